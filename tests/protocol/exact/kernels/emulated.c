/* Runs kernels of another processor under qemu, for `tests/protocol/exact/kernels/emulated.py`.

   The command-line argument names a file with the arrays. Each line of standard input is one call:
   NAME, then arguments. `p` marks a pointer, an offset into that file; `n` marks a number, with a
   float given by its bits. The result of each call is printed. */

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

typedef unsigned long number;
typedef number Kernel(number, number, number, number, number, number, number, number, number,
                      number, number);
#define KERNELS(_) \
  _(apply_update) _(add_rounded) _(has_not_finite) _(all_negative_zero) _(square_sums) _(round_bfloat16) \
  _(pack_bfloat16) _(unpack_bfloat16) _(pack_int8) _(unpack_int8) _(pack_int4) _(unpack_int4) \
  _(pack_topk) _(unpack_topk) _(factor_sums) _(piece_hashes)
#define DECLARE(name) extern void name(void);
#define ENTRY(name) {#name, (Kernel *)name},
KERNELS(DECLARE)
static const struct { const char *name; Kernel *call; } kernels[] = {KERNELS(ENTRY)};
unsigned scale(number, float, number, number, number);

int main(int count, char **arguments) {
  struct stat state;
  const int file = count == 2 ? open(arguments[1], O_RDWR) : -1;
  if (file < 0 || fstat(file, &state)) return 1;
  char *arena = mmap(0, state.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (arena == MAP_FAILED) return 1;
  char line[512], name[64];
  while (fgets(line, sizeof line, stdin)) {
    number call[11] = {0};
    int at = 0, used = 0;
    if (sscanf(line, "%63s%n", name, &at) != 1) return 1;
    char kind;
    for (int i = 0; i < 11 && sscanf(line + at, " %c%lu%n", &kind, call + i, &used) == 2; i++) {
      at += used;
      if (kind == 'p') call[i] += (number)arena;
    }
    number result = ~0ul;
    if (!strcmp(name, "scale")) {
      float factor;
      memcpy(&factor, call + 1, sizeof factor);
      result = scale(call[0], factor, call[2], call[3], call[4]);
    }
    for (number i = 0; i < sizeof kernels / sizeof *kernels; i++)
      if (!strcmp(name, kernels[i].name)) {
        const number *a = call;
        result = kernels[i].call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9],
                                 a[10]);
      }
    printf("%u\n", (unsigned)result);
    fflush(stdout);
  }
  return 0;
}
