/* Codecs. Definitions: bfloat16.py and codecs.py in protocol/exact/reduction, which describe the
   formats. */

#include "kernels.h"

typedef struct { f32 *values; u8 *head, *body; usize count; } Codec;
#define FOR_RANGE for (usize i = lo; i < hi; i++)

static void round_range(void *call, usize lo, usize hi) {
  f32 *values = ((Codec *)call)->values;
  FOR_RANGE values[i] = float_of(round_bits(bits_of(values[i])));
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
  FOR_RANGE body[i] = (u16)(bits_of(values[i]) >> 16);
}

void pack_bfloat16(f32 *values, u8 *body, usize count, u32 threads) {
  Codec call = {values, 0, body, count};
  in_parallel(pack_bfloat16_range, &call, count, 4096, threads);
}

static void unpack_bfloat16_range(void *call, usize lo, usize hi) {
  Codec *c = call;
  f32 *restrict values = c->values;
  const u16 *restrict body = (const u16 *)c->body;
  FOR_RANGE values[i] = float_of((u32)body[i] << 16);
}

void unpack_bfloat16(const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, 0, (u8 *)body, count};
  in_parallel(unpack_bfloat16_range, &call, count, 4096, threads);
}

/* int8 and int4: the values of a group share a scale, a power of two. */
#define NOT_FINITE (-128)
#define MIN_EXPONENT (-126)
#define ROUNDING_OFFSET 12582912.0f /* 1.5 * 2^23: a sum has the rounded integer in its low bits */

INLINE i32 exponent_of(u32 largest, i32 bits, u32 fraction_limit) {
  if (!largest) return -bits;
  const i32 exponent =
      (i32)(largest >> 23) - 126 - bits + ((largest & 0x7fffffu) > fraction_limit);
  return exponent > MIN_EXPONENT ? exponent : MIN_EXPONENT; /* subnormals are clamped here too */
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
  for (u32 i = 0; i < size; i++) q[i] = (i8)bits_of(values[i] * inverse + ROUNDING_OFFSET);
  return exponent;
}

INLINE float scale_of(i32 exponent) {
  if (exponent == NOT_FINITE) return float_of(0x7fc00000u);
  return float_of((u32)((exponent > MIN_EXPONENT ? exponent : MIN_EXPONENT) + 127) << 23);
}

/* Point `values` at a group; the last, partial group is copied and padded with zeros. */
#define LOAD_GROUP(size)                                                       \
  f32 padded[size];                                                        \
  const f32 *values = c->values + lo;                                      \
  const usize elements = c->count - lo < (size) ? c->count - lo : (size);      \
  if (elements < (size)) {                                                     \
    for (usize i = 0; i < (size); i++) padded[i] = i < elements ? values[i] : 0; \
    values = padded;                                                       \
  }

#define GROUP_8 64
static void pack_int8_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += GROUP_8) {
    i8 q[GROUP_8];
    LOAD_GROUP(GROUP_8)
    c->head[lo / GROUP_8] = (u8)quantize(values, q, GROUP_8, 7, 0x7e0000u);
    if (elements == GROUP_8) __builtin_memcpy(c->body + lo, q, GROUP_8);
    else for (usize i = 0; i < elements; i++) c->body[lo + i] = (u8)q[i];
  }
}

void pack_int8(f32 *values, u8 *head, u8 *body, usize count, u32 threads) {
  Codec call = {values, head, body, count};
  in_parallel(pack_int8_range, &call, count, GROUP_8, threads);
}

static void unpack_int8_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += GROUP_8) {
    const float scale = scale_of((i8)c->head[lo / GROUP_8]);
    const i8 *restrict body = (const i8 *)c->body + lo;
    f32 *restrict values = c->values + lo;
    const usize elements = c->count - lo;
    if (elements >= GROUP_8) for (usize i = 0; i < GROUP_8; i++) values[i] = (float)body[i] * scale;
    else for (usize i = 0; i < elements; i++) values[i] = (float)body[i] * scale;
  }
}

void unpack_int8(const u8 *head, const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, (u8 *)head, (u8 *)body, count};
  in_parallel(unpack_int8_range, &call, count, GROUP_8, threads);
}

#define GROUP_4 32
static void pack_int4_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += GROUP_4) {
    i8 q[GROUP_4];
    u8 pairs[GROUP_4 / 2];
    LOAD_GROUP(GROUP_4)
    c->head[lo / GROUP_4] = (u8)quantize(values, q, GROUP_4, 3, 0x600000u);
    for (u32 i = 0; i < GROUP_4 / 2; i++)
      pairs[i] = (u8)((q[2 * i] + 8) | (u8)(q[2 * i + 1] + 8) << 4);
    if (elements % 2) pairs[elements / 2] &= 15; /* the upper half of the last byte is unused */
    u8 *body = c->body + lo / 2;
    if (elements == GROUP_4) __builtin_memcpy(body, pairs, GROUP_4 / 2);
    else for (usize i = 0; i < (elements + 1) / 2; i++) body[i] = pairs[i];
  }
}

void pack_int4(f32 *values, u8 *head, u8 *body, usize count, u32 threads) {
  Codec call = {values, head, body, count};
  in_parallel(pack_int4_range, &call, count, GROUP_4, threads);
}

static void unpack_int4_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += GROUP_4) {
    const float scale = scale_of((i8)c->head[lo / GROUP_4]);
    const u8 *restrict body = c->body + lo / 2;
    f32 *restrict values = c->values + lo;
    const usize elements = c->count - lo < GROUP_4 ? c->count - lo : GROUP_4;
    if (elements == GROUP_4) {
      for (u32 i = 0; i < GROUP_4 / 2; i++) {
        values[2 * i] = (float)((i32)(body[i] & 15) - 8) * scale;
        values[2 * i + 1] = (float)((i32)(body[i] >> 4) - 8) * scale;
      }
    } else {
      for (usize i = 0; i < elements; i++)
        values[i] = (float)((i32)(i % 2 ? body[i / 2] >> 4 : body[i / 2] & 15) - 8) * scale;
    }
  }
}

void unpack_int4(const u8 *head, const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, (u8 *)head, (u8 *)body, count};
  in_parallel(unpack_int4_range, &call, count, GROUP_4, threads);
}

/* topk: of each region of 4096 values, the 64 with the largest magnitude; of a shorter last region,
   a 64th, rounded up. */
#define REGION_ELEMENTS 4096
#define SELECTED_PERIOD 64

/* Count the magnitudes of at least `bound`. */
INLINE u32 count_from(const i32 *magnitudes, u32 size, i32 bound) {
  i32 count = 0;
  for (u32 i = 0; i < size; i++) count += magnitudes[i] >= bound;
  return (u32)count;
}

static void pack_topk_range(void *call, usize first, usize last) {
  Codec *c = call;
  i32 magnitudes[REGION_ELEMENTS];
  for (usize lo = first; lo < last; lo += REGION_ELEMENTS) {
    const u32 size = c->count - lo < REGION_ELEMENTS ? (u32)(c->count - lo) : REGION_ELEMENTS;
    const u32 wanted = (size + SELECTED_PERIOD - 1) / SELECTED_PERIOD;
    const f32 *values = c->values + lo;
    for (u32 i = 0; i < size; i++) magnitudes[i] = (i32)(bits_of(values[i]) & MAGNITUDE);
    /* Find, bit by bit, the largest bound that `wanted` magnitudes reach; NaN is above infinity. */
    i32 bound = 0;
    u32 reach = size;
    for (i32 bit = 1 << 30; bit && reach != wanted; bit >>= 1) {
      const u32 count = count_from(magnitudes, size, bound | bit);
      if (count >= wanted) { bound |= bit; reach = count; }
    }
    /* Keep all values above `bound`, then the first of those equal to it, up to `wanted`. If exactly
     * `wanted` values are at least `bound`, keep all of them. */
    u32 equal = wanted;
    if (reach != wanted) equal = wanted - count_from(magnitudes, size, bound + 1);
    else bound -= 1;
    u16 *indices = (u16 *)c->head + lo / SELECTED_PERIOD;
    u16 *selected = (u16 *)c->body + lo / SELECTED_PERIOD;
    u32 filled = 0;
    for (u32 from = 0; from < size && filled < wanted; from += 64) {
      const u32 to = from + 64 < size ? from + 64 : size;
      i32 has_selected = 0;
      for (u32 i = from; i < to; i++) has_selected |= magnitudes[i] >= bound;
      if (!has_selected) continue;
      for (u32 i = from; i < to; i++) {
        if (magnitudes[i] < bound || filled == wanted) continue;
        if (magnitudes[i] == bound) {
          if (!equal || reach == wanted) continue;
          equal--;
        }
        indices[filled] = (u16)i;
        selected[filled++] = (u16)(round_bits(bits_of(values[i])) >> 16);
      }
    }
  }
}

/* `head` receives the indices and `body` the values, 16 bits each, in order of index. */
void pack_topk(f32 *values, u8 *head, u8 *body, usize count, u32 threads) {
  Codec call = {values, head, body, count};
  in_parallel(pack_topk_range, &call, count, REGION_ELEMENTS, threads);
}

static void unpack_topk_range(void *call, usize first, usize last) {
  Codec *c = call;
  for (usize lo = first; lo < last; lo += REGION_ELEMENTS) {
    const u32 size = c->count - lo < REGION_ELEMENTS ? (u32)(c->count - lo) : REGION_ELEMENTS;
    const u32 wanted = (size + SELECTED_PERIOD - 1) / SELECTED_PERIOD;
    f32 *values = c->values + lo;
    const u16 *indices = (const u16 *)c->head + lo / SELECTED_PERIOD;
    const u16 *selected = (const u16 *)c->body + lo / SELECTED_PERIOD;
    for (u32 i = 0; i < size; i++) values[i] = 0;
    for (u32 i = 0; i < wanted; i++)
      values[indices[i] < size ? indices[i] : size - 1] = float_of((u32)selected[i] << 16);
  }
}

void unpack_topk(const u8 *head, const u8 *body, f32 *values, usize count, u32 threads) {
  Codec call = {values, (u8 *)head, (u8 *)body, count};
  in_parallel(unpack_topk_range, &call, count, REGION_ELEMENTS, threads);
}
