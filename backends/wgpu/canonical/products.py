"""Matrix products on the CPU: register tiles of outputs, vectorized over columns.

An output is the sum over k, in increasing order from zero, with one fma per term, as in every
kernel of `backends.wgpu.shaders.matmul`. A sum is never split, so tiles and threads do not affect
the bits.

One C source serves all products; `Product` holds a product's parameters. An operand that is not
contiguous along the vectors is packed into panels of columns first. The operands are swapped if
that leaves fewer elements to pack.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from backends.wgpu.shaders.matmul.problem import MatmulProblem
from backends.wgpu.shaders.matmul.side import Side, sides
from backends.wgpu.shaders.quantized_layout import QuantizedLayout

_STORAGES: Final = {"f32": 0, "bf16": 1, "f16": 2, "int8": 3, "int4": 4}

TEXT: Final = r"""
typedef float vf __attribute__((ext_vector_type(LANES)));
typedef float vu __attribute__((ext_vector_type(LANES), aligned(4)));
#define COLUMNS (2 * LANES)
typedef struct {
  u64 batch, m, n, k;                   /* rows m are broadcast, columns n lie in vectors */
  u64 a_batch, a_m, a_k, a_offset;      /* in elements */
  u64 b_batch, b_k, b_n, b_offset;
  u64 out_batch, out_m, out_n, out_offset;
  u64 storage, group, scales, onto, packed, panels, row_tiles, a_at, b_at;
} Product;

INLINE float widened(const u32 *w, const Product *p, usize i) {
  float x;
  switch (p->storage) {
    case 1: return f32_of_u32((w[i / 2] >> (i % 2 * 16)) << 16);
    case 2: return widen_half((w[i / 2] >> (i % 2 * 16)) & 0xffffu);
    case 3: x = (float)bits_i32((i32)w[i / 4], (u32)(i % 4 * 8), 8u); break;
    default: x = (float)((i32)((w[i / 8] >> (i % 8 * 4)) & 15u) - 8); break;
  }
  return x * f32_of_u32(w[p->scales + i / p->group]);
}

/* Panels of columns: COLUMNS values for each k. */
void pack_panels(void *const *m, const u32 *numbers, usize first, usize last, u32 x, u32 y, u32 z) {
  const Product *p = (const Product *)numbers;
  (void)x; (void)y; (void)z;
  for (usize at = first; at < last; at++) {
    const usize batch = at / p->panels, panel = at % p->panels;
    const usize j0 = panel * COLUMNS, k = p->k;
    const usize width = p->n - j0 < COLUMNS ? p->n - j0 : COLUMNS;
    const usize base = batch * p->b_batch + j0 * p->b_n + p->b_offset;
    float *restrict to = (float *)m[3] + at * k * COLUMNS;
    if (p->storage) {
      const u32 *w = m[p->b_at];
      for (usize t = 0; t < k; t++)
        for (usize j = 0; j < COLUMNS; j++)
          to[t * COLUMNS + j] = j < width ? widened(w, p, base + t * p->b_k + j * p->b_n) : 0.0f;
      continue;
    }
    const float *restrict from = (const float *)m[p->b_at] + base;
    if (width < COLUMNS)
      for (usize i = 0; i < k * COLUMNS; i++) to[i] = 0.0f;
    if (p->b_k == 1) {
      usize t = 0;
      for (; t + 8 <= k; t += 8)
        for (usize j = 0; j < width; j++)
          for (usize u = 0; u < 8; u++) to[(t + u) * COLUMNS + j] = from[j * p->b_n + t + u];
      for (; t < k; t++)
        for (usize j = 0; j < width; j++) to[t * COLUMNS + j] = from[j * p->b_n + t];
    } else if (p->b_n == 1) {
      for (usize t = 0; t < k; t++)
        for (usize j = 0; j < width; j++) to[t * COLUMNS + j] = from[t * p->b_k + j];
    } else {
      for (usize t = 0; t < k; t++)
        for (usize j = 0; j < width; j++) to[t * COLUMNS + j] = from[t * p->b_k + j * p->b_n];
    }
  }
}

#if FUSED
#define TERM(a, b, c) __builtin_elementwise_fma((a), (b), (c))
#else
#define TERM(a, b, c) ((a) * (b) + (c))
#endif

INLINE void tile(usize rows, const float *a, usize a_m, usize a_k, const float *b, usize b_k,
                 usize k, vf (*sums)[2]) {
  vf s[ROWS][2];
#pragma clang loop unroll(full)
  for (usize i = 0; i < rows; i++) s[i][0] = s[i][1] = (vf)0.0f;
  for (usize t = 0; t < k; t++) {
    const vf b0 = *(const vu *)(b + t * b_k), b1 = *(const vu *)(b + t * b_k + LANES);
#pragma clang loop unroll(full)
    for (usize i = 0; i < rows; i++) {
      const vf x = (vf)a[i * a_m + t * a_k];
      s[i][0] = TERM(x, b0, s[i][0]);
      s[i][1] = TERM(x, b1, s[i][1]);
    }
  }
#pragma clang loop unroll(full)
  for (usize i = 0; i < rows; i++) { sums[i][0] = s[i][0]; sums[i][1] = s[i][1]; }
}

static void any_tile(usize rows, const float *a, usize a_m, usize a_k, const float *b, usize b_k,
                     usize k, vf (*sums)[2]) {
  switch (rows) {
#define ONE(r) case r: tile(r, a, a_m, a_k, b, b_k, k, sums); return;
    ONE(1) ONE(2) ONE(3) ONE(4) ONE(5) ONE(6)
#if ROWS > 6
    ONE(7) ONE(8) ONE(9) ONE(10) ONE(11) ONE(12)
#endif
  }
}

void products(void *const *m, const u32 *numbers, usize first, usize last, u32 x, u32 y, u32 z) {
  const Product *p = (const Product *)numbers;
  (void)x; (void)y; (void)z;
  for (usize at = first; at < last; at++) {
    const usize row_tile = at % p->row_tiles, panel = at / p->row_tiles % p->panels;
    const usize batch = at / p->row_tiles / p->panels;
    const usize i0 = row_tile * ROWS, j0 = panel * COLUMNS;
    const usize rows = p->m - i0 < ROWS ? p->m - i0 : ROWS;
    const usize width = p->n - j0 < COLUMNS ? p->n - j0 : COLUMNS;
    const float *a = (const float *)m[p->a_at] + batch * p->a_batch + i0 * p->a_m + p->a_offset;
    const float *b;
    usize b_k = COLUMNS;
    if (p->packed) {
      b = (const float *)m[3] + ((p->b_batch ? batch * p->panels : 0) + panel) * p->k * COLUMNS;
    } else {
      b = (const float *)m[p->b_at] + batch * p->b_batch + j0 + p->b_offset;
      b_k = p->b_k;
    }
    vf sums[ROWS][2];
    any_tile(rows, a, p->a_m, p->a_k, b, b_k, p->k, sums);
    float *out = (float *)m[2] + batch * p->out_batch + i0 * p->out_m;
    out += j0 * p->out_n + p->out_offset;
    const float *s = (const float *)sums;
    if (p->onto) {
      for (usize i = 0; i < rows; i++)
        for (usize j = 0; j < width; j++) {
          float *to = out + i * p->out_m + j * p->out_n;
          *to = *to + s[i * COLUMNS + j];
        }
    } else if (p->out_n == 1 && width == COLUMNS) {
      for (usize i = 0; i < rows; i++)
        for (usize j = 0; j < COLUMNS; j++) out[i * p->out_m + j] = s[i * COLUMNS + j];
    } else if (p->out_n == 1) {
      for (usize i = 0; i < rows; i++)
        for (usize j = 0; j < width; j++) out[i * p->out_m + j] = s[i * COLUMNS + j];
    } else {
      for (usize j = 0; j < width; j++)
        for (usize i = 0; i < rows; i++) out[i * p->out_m + j * p->out_n] = s[i * COLUMNS + j];
    }
  }
}
"""
"""C source that needs `LANES`, `ROWS`, `FUSED` and the prelude. Kernels have `SIGNATURE`, with a
`Product` in place of sizes. Buffers: a, b, out, and scratch memory for packed panels."""

_FIELDS: Final = [
    "batch",
    "m",
    "n",
    "k",
    "a_batch",
    "a_m",
    "a_k",
    "a_offset",
    "b_batch",
    "b_k",
    "b_n",
    "b_offset",
    "out_batch",
    "out_m",
    "out_n",
    "out_offset",
    "storage",
    "group",
    "scales",
    "onto",
    "packed",
    "panels",
    "row_tiles",
    "a_at",
    "b_at",
]


@dataclass(frozen=True, slots=True)
class Product:
    """The parameters of a product for the C source above.

    Attributes:
        numbers: The fields of the C structure.
        panels: Panels to pack; 0 if none.
        tiles: Tiles to compute.
        packed_words: Size of the packed panels, in words of 4 bytes.
    """

    numbers: tuple[int, ...]
    panels: int
    tiles: int
    packed_words: int

    def words(self) -> ctypes.Array[ctypes.c_uint64]:
        """Return the C structure."""
        return (ctypes.c_uint64 * len(self.numbers))(*self.numbers)


def plan_product(problem: MatmulProblem, lanes: int, rows: int) -> Product:
    """Choose the cheaper operand order for vectors of `lanes` floats and tiles of `rows` rows."""
    left, right = sides(problem)
    candidates = [_candidate(problem, left, right, lanes, rows, swap=False)]
    if problem.b_form is None:
        candidates.append(_candidate(problem, right, left, lanes, rows, swap=True))
    return min(candidates, key=lambda product: _cost(product, lanes))


def _cost(product: Product, lanes: int) -> float:
    """Estimate the cost: elements to pack, and multiplications including padding."""
    fields = dict(zip(_FIELDS, product.numbers, strict=True))
    products = fields["batch"] * fields["m"] * fields["panels"] * 2 * lanes * fields["k"]
    return (
        products / lanes
        + 1.5 * product.packed_words
        + (0.5 if fields["out_n"] != 1 else 0) * (fields["batch"] * fields["m"] * fields["n"])
    )


def _candidate(
    problem: MatmulProblem, row: Side, column: Side, lanes: int, rows: int, *, swap: bool
) -> Product:
    result, width = problem.result, 2 * lanes
    form = column.form
    panels = -(-column.extent // width)
    row_tiles = -(-row.extent // rows)
    # A partial last panel is packed, so that no read passes the end of the panel.
    is_packed = form is not None or column.outer != 1 or column.extent % width != 0
    packed_batches = problem.batch if column.batch else 1
    out = (1, result.row) if swap else (result.row, 1)
    numbers = (
        problem.batch, row.extent, column.extent, problem.k,
        row.batch, row.outer, row.inner, row.offset,
        column.batch, column.inner, column.outer, column.offset,
        problem.m * problem.n, *out, result.offset,
        *_storage_fields(form), int(result.accumulates), int(is_packed), panels, row_tiles,
        int(swap), int(not swap),
    )  # fmt: skip
    return Product(
        numbers,
        packed_batches * panels if is_packed else 0,
        problem.batch * panels * row_tiles,
        packed_batches * panels * problem.k * width if is_packed else 0,
    )


def _storage_fields(form: QuantizedLayout | None) -> tuple[int, int, int]:
    return (0, 0, 0) if form is None else (_STORAGES[form.storage], form.group, form.scales)
