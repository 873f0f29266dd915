/* XXH3-128 with seed 0 of more than 240 bytes, for state digests
   (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). A stripe is 64 bytes, a block
   16 stripes. Little-endian processors only, as all build targets are. */

#pragma once
#include "kernels.h"

typedef unsigned long u64;
typedef u64 Lanes __attribute__((vector_size(64)));
typedef struct { Lanes sums; usize blocks; } Hash;

#define STRIPE 64
#define BLOCK 1024
#define PREFETCH_BYTES 1024 /* distance of the prefetch ahead of the stripe that is hashed */
#define PIECE_BYTES 262144
#define SHORTEST_HASHED 241
#define PRIME32_1 0x9E3779B1ul
#define PRIME64_1 0x9E3779B185EBCA87ul
#define PRIME64_2 0xC2B2AE3D27D4EB4Ful
#define LOW_HALF 0xfffffffful

extern const u8 hash_secret[192];

INLINE u64 u64_at(const u8 *bytes) { u64 value; __builtin_memcpy(&value, bytes, 8); return value; }
INLINE Lanes lanes_at(const u8 *bytes) {
  Lanes lanes; __builtin_memcpy(&lanes, bytes, STRIPE); return lanes;
}

INLINE Lanes add_stripe(Lanes sums, const u8 *stripe, const u8 *secret) {
  const Lanes data = lanes_at(stripe), key = data ^ lanes_at(secret);
  sums += __builtin_shufflevector(data, data, 1, 0, 3, 2, 5, 4, 7, 6);
  return sums + (key & LOW_HALF) * (key >> 32);
}

INLINE void begin_hash(Hash *hash) {
  hash->sums = (Lanes){0xC2B2AE3Dul, PRIME64_1, PRIME64_2, 0x165667B19E3779F9ul,
                       0x85EBCA77C2B2AE63ul, 0x85EBCA77ul, 0x27D4EB2F165667C5ul, PRIME32_1};
  hash->blocks = 0;
}

/* Hash the whole blocks among the first `available` of `bytes` bytes, except the block of the last
   byte, which `end_hash` handles. */
INLINE void hash_blocks(Hash *hash, const u8 *from, usize available, usize bytes) {
  const usize whole = (available < bytes ? available : bytes - 1) / BLOCK;
  Lanes sums = hash->sums;
  for (; hash->blocks < whole; hash->blocks++) {
    const u8 *block = from + hash->blocks * BLOCK;
    for (usize n = 0; n < BLOCK / STRIPE; n++) {
      __builtin_prefetch(block + n * STRIPE + PREFETCH_BYTES);
      sums = add_stripe(sums, block + n * STRIPE, hash_secret + n * 8);
    }
    sums = (sums ^ (sums >> 47) ^ lanes_at(hash_secret + 128)) * PRIME32_1;
  }
  hash->sums = sums;
}

/* XOR the halves of the 128-bit product. */
INLINE u64 fold(u64 left, u64 right) {
  const unsigned __int128 product = (unsigned __int128)left * right;
  return (u64)product ^ (u64)(product >> 64);
}

INLINE u64 merge_sums(Lanes sums, const u8 *secret, u64 start) {
  for (int n = 0; n < 4; n++)
    start += fold(sums[2 * n] ^ u64_at(secret + 16 * n),
                    sums[2 * n + 1] ^ u64_at(secret + 16 * n + 8));
  start = (start ^ (start >> 37)) * 0x165667919E3779F9ul;
  return start ^ (start >> 32);
}

/* Hash the remaining of `bytes` bytes, and write the 16 bytes of the canonical form. */
INLINE void end_hash(Hash *hash, const u8 *from, usize bytes, u8 *out) {
  hash_blocks(hash, from, bytes, bytes);
  const u8 *tail = from + hash->blocks * BLOCK;
  const usize stripes = (usize)(from + bytes - 1 - tail) / STRIPE;
  Lanes sums = hash->sums;
  for (usize n = 0; n < stripes; n++)
    sums = add_stripe(sums, tail + n * STRIPE, hash_secret + n * 8);
  sums = add_stripe(sums, from + bytes - STRIPE, hash_secret + 121);
  const u64 high = __builtin_bswap64(merge_sums(sums, hash_secret + 117, ~(bytes * PRIME64_2)));
  const u64 low = __builtin_bswap64(merge_sums(sums, hash_secret + 11, bytes * PRIME64_1));
  __builtin_memcpy(out, &high, 8);
  __builtin_memcpy(out + 8, &low, 8);
}
