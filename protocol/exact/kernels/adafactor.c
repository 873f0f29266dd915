/* Adafactor's sums of squares by row and by column. Their definition is `_square_sums` in
   protocol/exact/adafactor.py: the same float64 operations in the same order. */

#include "kernels.h"

#define PIECE_COLUMNS 1024
#define LANES 16
typedef struct {
  const f32 *g; usize rows, columns, pieces; f64 epsilon, *row_sums, *column_sums;
} Sums;

/* Sum pieces [lo, hi), counted over all matrices. A piece has whole columns, so one thread sums
   each column from the first row to the last. */
static void sum_pieces(void *call, usize lo, usize hi) {
  const Sums *s = call;
  for (usize n = lo; n < hi; n++) {
    const usize matrix = n / s->pieces, from = n % s->pieces * PIECE_COLUMNS;
    const usize width = s->columns - from < PIECE_COLUMNS ? s->columns - from : PIECE_COLUMNS;
    f64 *restrict const columns = s->column_sums + matrix * s->columns + from;
    f64 *restrict const rows = s->row_sums + n * s->rows;
    for (usize j = 0; j < width; j++) columns[j] = 0;
    for (usize r = 0; r < s->rows; r++) {
      const f32 *restrict const g = s->g + (matrix * s->rows + r) * s->columns + from;
      f64 lanes[LANES] = {0};
      usize j = 0;
      for (; j + LANES <= width; j += LANES)
        for (usize l = 0; l < LANES; l++) {
          const f64 value = g[j + l], square = value * value + s->epsilon;
          lanes[l] += square;
          columns[j + l] += square;
        }
      for (; j < width; j++) {
        const f64 value = g[j], square = value * value + s->epsilon;
        lanes[j % LANES] += square;
        columns[j] += square;
      }
      for (usize half = LANES / 2; half; half /= 2)
        for (usize l = 0; l < half; l++) lanes[l] += lanes[l + half];
      rows[r] = lanes[0];
    }
  }
}

/* Sum the squares, each plus epsilon, of `count` matrices of shape (rows, columns). `row_sums`, of
   shape (count, pieces, rows), receives the sums of each row over each piece of columns;
   `column_sums`, of shape (count, columns), those of each column. */
void factor_sums(const f32 *g, usize count, usize rows, usize columns, const f64 *epsilon,
                 f64 *row_sums, f64 *column_sums, u32 threads) {
  const usize pieces = (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS;
  Sums call = {g, rows, columns, pieces, *epsilon, row_sums, column_sums};
  in_parallel(sum_pieces, &call, count * pieces, 1, threads);
}
