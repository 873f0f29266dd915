/* Sums, averages and checks. Definitions, in protocol/exact/reduction: `add_rounded` in tree_sum.py;
   `average`, `is_finite` and `square_sum` in average.py; `is_absent` in absent.py. A plain
   float32 addition is not here: numpy takes a single pass for it too. */

#include "kernels.h"

typedef struct {
  f32 *out; const f32 *left, *right; float factor; u32 has_not_finite; f64 *squares;
} Sums;
#define FOR_RANGE for (usize i = lo; i < hi; i++)
#define REPORT(bad) __atomic_fetch_or(&s->has_not_finite, (bad) != 0, __ATOMIC_RELAXED)

static void add_rounded_range(void *call, usize lo, usize hi) {
  Sums *s = call;
  f32 *out = s->out;
  const f32 *right = s->right;
  FOR_RANGE out[i] = float_of(round_bits(bits_of(out[i] + right[i])));
}

/* Add `right` to `left`, in place, and round to bfloat16. */
void add_rounded(f32 *left, const f32 *right, usize count, u32 threads) {
  Sums call = {left, left, right, 0, 0, 0};
  in_parallel(add_rounded_range, &call, count, 4096, threads);
}

static void scale_range(void *call, usize lo, usize hi) {
  Sums *s = call;
  f32 *out = s->out;
  const f32 *left = s->left;
  const float factor = s->factor;
  u32 bad = 0;
  FOR_RANGE { const float scaled = left[i] * factor; out[i] = scaled; bad |= not_finite(scaled); }
  REPORT(bad);
}

/* Multiply by `factor`; `out` may be `values`. Return whether a product is not finite. */
u32 scale(const f32 *values, float factor, f32 *out, usize count, u32 threads) {
  Sums call = {out, values, 0, factor, 0, 0};
  in_parallel(scale_range, &call, count, 4096, threads);
  return call.has_not_finite;
}

#define CHECK 4096 /* values that are checked before the loop tests the result */

static void finite_range(void *call, usize lo, usize hi) {
  Sums *s = call;
  const f32 *left = s->left;
  for (usize from = lo; from < hi; from += CHECK) {
    const usize to = from + CHECK < hi ? from + CHECK : hi;
    u32 bad = 0;
    for (usize i = from; i < to; i++) bad |= not_finite(left[i]);
    if (bad) { REPORT(bad); return; }
  }
}

/* Return whether a value is not finite. */
u32 has_not_finite(const f32 *values, usize count, u32 threads) {
  Sums call = {0, values, 0, 0, 0, 0};
  in_parallel(finite_range, &call, count, CHECK, threads);
  return call.has_not_finite;
}

/* Return whether all values are -0.0. */
u32 all_negative_zero(const f32 *values, usize count) {
  for (usize from = 0; from < count; from += CHECK) {
    const usize to = from + CHECK < count ? from + CHECK : count;
    u32 differs = 0;
    for (usize i = from; i < to; i++) differs |= bits_of(values[i]) ^ 0x80000000u;
    if (differs) return 0;
  }
  return 1;
}

/* numpy's pairwise summation (umath/loops_utils.h, `pairwise_sum`): eight running sums
   over at most 128 values; longer arrays are halved. A square of a float32 is exact in float64. */
#define RUN_ELEMENTS 128
#define SQUARE_CHUNK_ELEMENTS 65536

static f64 squares_of(const f32 *values, usize count) {
  if (count > RUN_ELEMENTS) {
    usize half = count / 2;
    half -= half % 8;
    return squares_of(values, half) + squares_of(values + half, count - half);
  }
  if (count < 8) {
    f64 sum = 0;
    for (usize i = 0; i < count; i++) { const f64 x = values[i]; sum += x * x; }
    return sum;
  }
  f64 r[8];
  for (u32 j = 0; j < 8; j++) { const f64 x = values[j]; r[j] = x * x; }
  usize i = 8;
  for (; i < count - count % 8; i += 8)
    for (u32 j = 0; j < 8; j++) { const f64 x = values[i + j]; r[j] += x * x; }
  f64 sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
  for (; i < count; i++) { const f64 x = values[i]; sum += x * x; }
  return sum;
}

static void squares_range(void *call, usize lo, usize hi) {
  Sums *s = call;
  for (usize from = lo; from < hi; from += SQUARE_CHUNK_ELEMENTS)
    s->squares[from / SQUARE_CHUNK_ELEMENTS] =
        squares_of(s->left + from,
                   from + SQUARE_CHUNK_ELEMENTS < hi ? SQUARE_CHUNK_ELEMENTS : hi - from);
}

/* Write the sum of squares of each chunk of 65,536 values to `squares`. */
void square_sums(const f32 *values, usize count, f64 *squares, u32 threads) {
  Sums call = {0, values, 0, 0, 0, squares};
  in_parallel(squares_range, &call, count, SQUARE_CHUNK_ELEMENTS, threads);
}
