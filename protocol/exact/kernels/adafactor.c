/* Adafactor's sums of squares by row and by column. Their definition is `_sums` in
   protocol/exact/adafactor.py: the same float64 operations in the same order. */

#include "kernels.h"

#define PIECE_COLUMNS 1024
#define LANES 16
typedef struct {
  const f32 *g; usize rows, columns, pieces; f64 epsilon, *of_rows, *of_columns;
} Sums;

/* Pieces of columns, of all matrices: a thread has whole columns, and so their order. */
static void sums_of_pieces(void *call, usize lo, usize hi) {
  const Sums *s = call;
  for (usize n = lo; n < hi; n++) {
    const usize matrix = n / s->pieces, from = n % s->pieces * PIECE_COLUMNS;
    const usize width = s->columns - from < PIECE_COLUMNS ? s->columns - from : PIECE_COLUMNS;
    f64 *restrict const columns = s->of_columns + matrix * s->columns + from;
    f64 *restrict const rows = s->of_rows + n * s->rows;
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

/* For `count` matrices: `of_rows` receives (count, pieces, rows) sums over a piece of columns each,
   `of_columns` (count, columns) sums. */
void factor_sums(const f32 *g, usize count, usize rows, usize columns, const f64 *epsilon,
                 f64 *of_rows, f64 *of_columns, u32 threads) {
  const usize pieces = (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS;
  Sums call = {g, rows, columns, pieces, *epsilon, of_rows, of_columns};
  in_parallel(sums_of_pieces, &call, count * pieces, 1, threads);
}
