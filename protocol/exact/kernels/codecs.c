/* Codecs. Definitions: protocol/exact/reduction/bfloat16.py and protocol/exact/reduction/codecs.py, which explain the
   formats. */

#include "kernels.h"

typedef struct { f32 *values; u8 *head, *body; usize count; } Codec;
#define EACH for (usize i = lo; i < hi; i++)

static void round_range(void *call, usize lo, usize hi) {
  f32 *values = ((Codec *)call)->values;
  EACH values[i] = float_of(rounded_bits(bits_of(values[i])));
}

/* Round to bfloat16, in place. */
void round_bfloat16(f32 *values, usize count, u32 threads) {
  Codec call = {values, 0, 0, count};
  in_parallel(round_range, &call, count, 4096, threads);
}

static void pack_bfloat16_range(void *call, usize lo, usize hi) {
  Codec *c = call;
  const f32 *restrict values = c->values;
  u16 *restrict body = (u16 *)c->body;
  EACH body[i] = (u16)(bits_of(values[i]) >> 16);
}

void pack_bfloat16(f32 *values, u8 *body, usize count, u32 threads) {
  Codec call = {values, 0, body, count};
  in_parallel(pack_bfloat16_range, &call, count, 4096, threads);
}

static void unpack_bfloat16_range(void *call, usize lo, usize hi) {
  Codec *c = call;
  f32 *restrict values = c->values;
  const u16 *restrict body = (const u16 *)c->body;
  EACH values[i] = float_of((u32)body[i] << 16);
}

void unpack_bfloat16(const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, 0, (u8 *)body, count};
  in_parallel(unpack_bfloat16_range, &call, count, 4096, threads);
}

/* int8 and int4: the values of a group share a scale, a power of two. */
#define NOT_FINITE (-128)
#define LEAST (-126)
#define TO_WHOLE 12582912.0f /* 1.5 * 2^23: adding it leaves the rounded integer in the low mantissa bits */

INLINE i32 exponent_of(u32 largest, i32 bits, u32 fraction_limit) {
  if (!largest) return -bits;
  const i32 exponent =
      (i32)(largest >> 23) - 126 - bits + ((largest & 0x7fffffu) > fraction_limit);
  return exponent > LEAST ? exponent : LEAST; /* subnormals are clamped here too */
}

/* Write `size` integers to `q`; return the exponent. */
INLINE i32 quantize(const f32 *restrict values, i8 *restrict q, u32 size, i32 bits, u32 limit) {
  u32 largest = 0;
  for (u32 i = 0; i < size; i++) {
    const u32 magnitude = bits_of(values[i]) & MAGNITUDE;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= EXPONENT) {
    for (u32 i = 0; i < size; i++) q[i] = 0;
    return NOT_FINITE;
  }
  const i32 exponent = exponent_of(largest, bits, limit);
  const float inverse = float_of((u32)(127 - exponent) << 23);
  for (u32 i = 0; i < size; i++) q[i] = (i8)bits_of(values[i] * inverse + TO_WHOLE);
  return exponent;
}

INLINE float scale_of(i32 exponent) {
  if (exponent == NOT_FINITE) return float_of(0x7fc00000u);
  return float_of((u32)((exponent > LEAST ? exponent : LEAST) + 127) << 23);
}

/* Point `values` at a group; the last, partial group is copied and padded with zeros. */
#define PADDED(size)                                                       \
  f32 padded[size];                                                        \
  const f32 *values = c->values + lo;                                      \
  const usize here = c->count - lo < (size) ? c->count - lo : (size);      \
  if (here < (size)) {                                                     \
    for (usize i = 0; i < (size); i++) padded[i] = i < here ? values[i] : 0; \
    values = padded;                                                       \
  }

#define SIZE_8 64
static void pack_int8_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += SIZE_8) {
    i8 q[SIZE_8];
    PADDED(SIZE_8)
    c->head[lo / SIZE_8] = (u8)quantize(values, q, SIZE_8, 7, 0x7e0000u);
    if (here == SIZE_8) __builtin_memcpy(c->body + lo, q, SIZE_8);
    else for (usize i = 0; i < here; i++) c->body[lo + i] = (u8)q[i];
  }
}

void pack_int8(f32 *values, u8 *head, u8 *body, usize count, u32 threads) {
  Codec call = {values, head, body, count};
  in_parallel(pack_int8_range, &call, count, SIZE_8, threads);
}

static void unpack_int8_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += SIZE_8) {
    const float scale = scale_of((i8)c->head[lo / SIZE_8]);
    const i8 *restrict body = (const i8 *)c->body + lo;
    f32 *restrict values = c->values + lo;
    const usize here = c->count - lo;
    if (here >= SIZE_8) for (usize i = 0; i < SIZE_8; i++) values[i] = (float)body[i] * scale;
    else for (usize i = 0; i < here; i++) values[i] = (float)body[i] * scale;
  }
}

void unpack_int8(const u8 *head, const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, (u8 *)head, (u8 *)body, count};
  in_parallel(unpack_int8_range, &call, count, SIZE_8, threads);
}

#define SIZE_4 32
static void pack_int4_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += SIZE_4) {
    i8 q[SIZE_4];
    u8 pairs[SIZE_4 / 2];
    PADDED(SIZE_4)
    c->head[lo / SIZE_4] = (u8)quantize(values, q, SIZE_4, 3, 0x600000u);
    for (u32 i = 0; i < SIZE_4 / 2; i++)
      pairs[i] = (u8)((q[2 * i] + 8) | (u8)(q[2 * i + 1] + 8) << 4);
    if (here % 2) pairs[here / 2] &= 15; /* nothing follows the last value */
    u8 *body = c->body + lo / 2;
    if (here == SIZE_4) __builtin_memcpy(body, pairs, SIZE_4 / 2);
    else for (usize i = 0; i < (here + 1) / 2; i++) body[i] = pairs[i];
  }
}

void pack_int4(f32 *values, u8 *head, u8 *body, usize count, u32 threads) {
  Codec call = {values, head, body, count};
  in_parallel(pack_int4_range, &call, count, SIZE_4, threads);
}

static void unpack_int4_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += SIZE_4) {
    const float scale = scale_of((i8)c->head[lo / SIZE_4]);
    const u8 *restrict body = c->body + lo / 2;
    f32 *restrict values = c->values + lo;
    const usize here = c->count - lo < SIZE_4 ? c->count - lo : SIZE_4;
    if (here == SIZE_4) {
      for (u32 i = 0; i < SIZE_4 / 2; i++) {
        values[2 * i] = (float)((i32)(body[i] & 15) - 8) * scale;
        values[2 * i + 1] = (float)((i32)(body[i] >> 4) - 8) * scale;
      }
    } else {
      for (usize i = 0; i < here; i++)
        values[i] = (float)((i32)(i % 2 ? body[i / 2] >> 4 : body[i / 2] & 15) - 8) * scale;
    }
  }
}

void unpack_int4(const u8 *head, const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, (u8 *)head, (u8 *)body, count};
  in_parallel(unpack_int4_range, &call, count, SIZE_4, threads);
}

/* topk: of each region of 4096 the 64 largest; of the last, a 64th. */
#define REGION 4096
#define SHARE 64

INLINE u32 count_from(const i32 *magnitudes, u32 size, i32 least) {
  i32 found = 0;
  for (u32 i = 0; i < size; i++) found += magnitudes[i] >= least;
  return (u32)found;
}

static void pack_topk_range(void *call, usize first, usize last) {
  Codec *c = call;
  i32 magnitudes[REGION];
  for (usize lo = first; lo < last; lo += REGION) {
    const u32 size = c->count - lo < REGION ? (u32)(c->count - lo) : REGION;
    const u32 wanted = (size + SHARE - 1) / SHARE;
    const f32 *values = c->values + lo;
    for (u32 i = 0; i < size; i++) magnitudes[i] = (i32)(bits_of(values[i]) & MAGNITUDE);
    /* The largest magnitude that at least `wanted` values reach, bit by bit; NaN is above infinity. */
    i32 least = 0;
    u32 reach = size;
    for (i32 bit = 1 << 30; bit && reach != wanted; bit >>= 1) {
      const u32 found = count_from(magnitudes, size, least | bit);
      if (found >= wanted) { least |= bit; reach = found; }
    }
    /* Keep all values above `least`, then the first of those equal to it, up to `wanted`. If exactly
     * `wanted` values are at least `least`, keep all of them. */
    u32 equal = wanted;
    if (reach != wanted) equal = wanted - count_from(magnitudes, size, least + 1);
    else least -= 1;
    u16 *indices = (u16 *)c->head + lo / SHARE, *kept = (u16 *)c->body + lo / SHARE;
    u32 at = 0;
    for (u32 from = 0; from < size && at < wanted; from += 64) {
      const u32 to = from + 64 < size ? from + 64 : size;
      i32 any = 0;
      for (u32 i = from; i < to; i++) any |= magnitudes[i] >= least;
      if (!any) continue;
      for (u32 i = from; i < to; i++) {
        if (magnitudes[i] < least || at == wanted) continue;
        if (magnitudes[i] == least) {
          if (!equal || reach == wanted) continue;
          equal--;
        }
        indices[at] = (u16)i;
        kept[at++] = (u16)(rounded_bits(bits_of(values[i])) >> 16);
      }
    }
  }
}

/* `head` gets the indices, `body` the values; both 16 bits each, in order of index. */
void pack_topk(f32 *values, u8 *head, u8 *body, usize count, u32 threads) {
  Codec call = {values, head, body, count};
  in_parallel(pack_topk_range, &call, count, REGION, threads);
}

static void unpack_topk_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += REGION) {
    const u32 size = c->count - lo < REGION ? (u32)(c->count - lo) : REGION;
    const u32 wanted = (size + SHARE - 1) / SHARE;
    f32 *values = c->values + lo;
    const u16 *indices = (const u16 *)c->head + lo / SHARE;
    const u16 *kept = (const u16 *)c->body + lo / SHARE;
    for (u32 i = 0; i < size; i++) values[i] = 0;
    for (u32 i = 0; i < wanted; i++)
      values[indices[i] < size ? indices[i] : size - 1] = float_of((u32)kept[i] << 16);
  }
}

void unpack_topk(const u8 *head, const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, (u8 *)head, (u8 *)body, count};
  in_parallel(unpack_topk_range, &call, count, REGION, threads);
}
