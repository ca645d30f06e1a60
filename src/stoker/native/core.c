// What the interpreter is too slow for, without its lock: copy rows, and read records and compare their sums.
//
// Plain C that is loaded with ctypes, so one library serves every version of Python. All of it has a twin in
// Python, which gives the same bytes; tests compare the two.
//
// XXH3 (64 bits, with a seed) is written after its specification:
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int stoker_version(void) { return 2; }

// ---------------------------------------------------------------------------------------------------------
// Rows. A row is at a random place, which the processor cannot foresee: without a hint it waits for memory at
// the begin of each.

enum { LINE = 64, HINTED = 1024, AHEAD = 4096, MOST = 16 };  // bytes: a line, what is hinted of a row; rows

// Returns the first place of `index` that is not among the rows, -1 if there is none.
PUBLIC int64_t stoker_gather(
    const char *from, int64_t rows, size_t stride, const int64_t *index, size_t count, size_t row, char *to) {
  size_t ahead = row >= AHEAD ? 1 : row * MOST <= AHEAD ? MOST : AHEAD / row;
  size_t hinted = row < HINTED ? row : HINTED;
  for (size_t i = 0; i < count; i++)
    if (index[i] < 0 || index[i] >= rows) return (int64_t)i;
  for (size_t i = 0; i < count; i++) {
    if (i + ahead < count) {
      const char *next = from + (size_t)index[i + ahead] * stride;
      for (size_t at = 0; at < hinted; at += LINE) __builtin_prefetch(next + at, 0, 0);
    }
    memcpy(to + i * row, from + (size_t)index[i] * stride, row);
  }
  return -1;
}

PUBLIC void stoker_copy(size_t count, const char *const *from, char *const *to, size_t size) {
  for (size_t i = 0; i < count; i++) memcpy(to[i], from[i], size);
}

// ---------------------------------------------------------------------------------------------------------
// Rows of bytes as float32, times a scale, plus a shift: each product is rounded before the sum, as in torch.

enum { STREAMED = 1024 };  // values: a run of so many is written past the caches, which it would only empty

typedef struct {
  // Of a run of one channel, and of values that each have a scale and a shift of their own.
  void (*run)(const uint8_t *from, size_t count, float scale, float shift, float *to);
  void (*each)(const uint8_t *from, size_t count, const float *scale, const float *shift, float *to);
} Scaled;

static void run_plain(const uint8_t *from, size_t count, float scale, float shift, float *to) {
  for (size_t i = 0; i < count; i++) to[i] = (float)from[i] * scale + shift;
}

static void each_plain(const uint8_t *from, size_t count, const float *scale, const float *shift, float *to) {
  for (size_t i = 0; i < count; i++) to[i] = (float)from[i] * scale[i] + shift[i];
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static inline __m256 eight(const uint8_t *from, __m256 scale, __m256 shift) {
  __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
  return _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(wide), scale), shift);
}

__attribute__((target("avx2"))) static void run_avx2(
    const uint8_t *from, size_t count, float scale, float shift, float *to) {
  __m256 factor = _mm256_set1_ps(scale), summand = _mm256_set1_ps(shift);
  size_t i = 0;
  if (count >= STREAMED) {
    i = (32 - (uintptr_t)to % 32) % 32 / 4;
    run_plain(from, i, scale, shift, to);
    for (; i + 8 <= count; i += 8) _mm256_stream_ps(to + i, eight(from + i, factor, summand));
  }
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, eight(from + i, factor, summand));
  run_plain(from + i, count - i, scale, shift, to + i);
}

__attribute__((target("avx2"))) static void each_avx2(
    const uint8_t *from, size_t count, const float *scale, const float *shift, float *to) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, eight(from + i, _mm256_loadu_ps(scale + i), _mm256_loadu_ps(shift + i)));
  each_plain(from + i, count - i, scale + i, shift + i, to + i);
}
#endif

static Scaled best_scaled(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return (Scaled){run_avx2, each_avx2};
#endif
  return (Scaled){run_plain, each_plain};
}

// `row`: values of one, in runs of `inner` of one channel; 0: each of `channels` values has its own scale, and
// then they repeat. As `stoker_gather` otherwise.
PUBLIC int64_t stoker_scale(const uint8_t *from, int64_t rows, size_t stride, const int64_t *index, size_t count,
    size_t row, const float *scale, const float *shift, size_t channels, size_t inner, float *to) {
  Scaled scaled = best_scaled();
  for (size_t i = 0; i < count; i++)
    if (index[i] < 0 || index[i] >= rows) return (int64_t)i;
  for (size_t i = 0; i < count; i++, to += row) {
    const uint8_t *own = from + (size_t)index[i] * stride;
    if (inner)
      for (size_t at = 0, channel = 0; at < row; at += inner, channel = (channel + 1) % channels)
        scaled.run(own + at, inner, scale[channel], shift[channel], to + at);
    else
      for (size_t at = 0; at < row; at += channels)
        scaled.each(own + at, row - at < channels ? row - at : channels, scale, shift, to + at);
  }
#if defined(__x86_64__)
  _mm_sfence();  // what was streamed is there before another thread hears of it
#endif
  return -1;
}

// ---------------------------------------------------------------------------------------------------------
// XXH3.

enum { SECRET = 192, STRIPE = 64, STEP = 8, STRIPES = (SECRET - STRIPE) / STEP };

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u

static const uint8_t DEFAULT_SECRET[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static inline uint64_t word(const void *at) {
  uint64_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

typedef void (*Stripes)(uint64_t *sums, const uint8_t *data, const uint8_t *secret, size_t count);

// Eight sums of 64 bits each; each stripe of 64 bytes is added to them, under its part of the secret.
#if defined(__x86_64__)
static void stripes_sse2(uint64_t *sums, const uint8_t *data, const uint8_t *secret, size_t count) {
  __m128i kept[4];
  for (int i = 0; i < 4; i++) kept[i] = _mm_loadu_si128((const __m128i *)sums + i);
  for (; count; count--, data += STRIPE, secret += STEP)
    for (int i = 0; i < 4; i++) {
      __m128i values = _mm_loadu_si128((const __m128i *)data + i);
      __m128i keyed = _mm_xor_si128(values, _mm_loadu_si128((const __m128i *)secret + i));
      __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
      __m128i swapped = _mm_shuffle_epi32(values, _MM_SHUFFLE(1, 0, 3, 2));
      kept[i] = _mm_add_epi64(kept[i], _mm_add_epi64(product, swapped));
    }
  for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)sums + i, kept[i]);
}

__attribute__((target("avx2"))) static void stripes_avx2(
    uint64_t *sums, const uint8_t *data, const uint8_t *secret, size_t count) {
  __m256i low = _mm256_loadu_si256((const __m256i *)sums), high = _mm256_loadu_si256((const __m256i *)sums + 1);
  for (; count; count--, data += STRIPE, secret += STEP) {
    __m256i a = _mm256_loadu_si256((const __m256i *)data), b = _mm256_loadu_si256((const __m256i *)data + 1);
    __m256i c = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)secret));
    __m256i d = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)secret + 1));
    __m256i e = _mm256_mul_epu32(c, _mm256_srli_epi64(c, 32)), f = _mm256_mul_epu32(d, _mm256_srli_epi64(d, 32));
    low = _mm256_add_epi64(low, _mm256_add_epi64(e, _mm256_shuffle_epi32(a, _MM_SHUFFLE(1, 0, 3, 2))));
    high = _mm256_add_epi64(high, _mm256_add_epi64(f, _mm256_shuffle_epi32(b, _MM_SHUFFLE(1, 0, 3, 2))));
  }
  _mm256_storeu_si256((__m256i *)sums, low);
  _mm256_storeu_si256((__m256i *)sums + 1, high);
}
#elif defined(__aarch64__)
static void stripes_neon(uint64_t *sums, const uint8_t *data, const uint8_t *secret, size_t count) {
  uint64x2_t kept[4];
  for (int i = 0; i < 4; i++) kept[i] = vld1q_u64(sums + 2 * i);
  for (; count; count--, data += STRIPE, secret += STEP)
    for (int i = 0; i < 4; i++) {
      uint64x2_t values = vreinterpretq_u64_u8(vld1q_u8(data + 16 * i));
      uint64x2_t keyed = veorq_u64(values, vreinterpretq_u64_u8(vld1q_u8(secret + 16 * i)));
      kept[i] = vaddq_u64(kept[i], vextq_u64(values, values, 1));
      kept[i] = vmlal_u32(kept[i], vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
    }
  for (int i = 0; i < 4; i++) vst1q_u64(sums + 2 * i, kept[i]);
}
#endif

static Stripes best_stripes(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") ? stripes_avx2 : stripes_sse2;
#elif defined(__aarch64__)
  return stripes_neon;
#else
#error "only for x86-64 and arm64"
#endif
}

static void scramble(uint64_t *sums, const uint8_t *secret) {
  for (int i = 0; i < 8; i++) sums[i] = (sums[i] ^ sums[i] >> 47 ^ word(secret + 8 * i)) * P32_1;
}

static inline uint64_t folded(uint64_t a, uint64_t b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t value) {
  value = (value ^ value >> 37) * 0x165667919E3779F9u;
  return value ^ value >> 32;
}

static inline uint64_t avalanche64(uint64_t value) {
  value = (value ^ value >> 33) * P64_2;
  value = (value ^ value >> 29) * P64_3;
  return value ^ value >> 32;
}

static inline uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

static inline uint64_t half(const void *at) {
  uint32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

static inline uint64_t mixed(const uint8_t *data, const uint8_t *secret, uint64_t seed) {
  return folded(word(data) ^ (word(secret) + seed), word(data + 8) ^ (word(secret + 8) - seed));
}

// Up to 240 bytes.
static uint64_t short_digest(const uint8_t *data, size_t size, uint64_t seed) {
  const uint8_t *secret = DEFAULT_SECRET, *end = data + size;
  if (size == 0) return avalanche64(seed ^ word(secret + 56) ^ word(secret + 64));
  if (size < 4) {
    uint32_t all = (uint32_t)data[0] << 16 | (uint32_t)data[size >> 1] << 24 | end[-1] | (uint32_t)size << 8;
    return avalanche64(all ^ ((half(secret) ^ half(secret + 4)) + seed));
  }
  if (size <= 8) {
    seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    uint64_t value = (half(end - 4) + (half(data) << 32)) ^ ((word(secret + 8) ^ word(secret + 16)) - seed);
    value = (value ^ rotated(value, 49) ^ rotated(value, 24)) * 0x9FB21C651E98DF25u;
    value = (value ^ ((value >> 35) + size)) * 0x9FB21C651E98DF25u;
    return value ^ value >> 28;
  }
  if (size <= 16) {
    uint64_t low = word(data) ^ ((word(secret + 24) ^ word(secret + 32)) + seed);
    uint64_t high = word(end - 8) ^ ((word(secret + 40) ^ word(secret + 48)) - seed);
    return avalanche(size + __builtin_bswap64(low) + high + folded(low, high));
  }
  uint64_t sum = size * P64_1;
  if (size <= 128) {
    for (int i = (int)(size - 1) / 32; i >= 0; i--)
      sum += mixed(data + 16 * i, secret + 32 * i, seed) + mixed(end - 16 * (i + 1), secret + 32 * i + 16, seed);
    return avalanche(sum);
  }
  for (int i = 0; i < 8; i++) sum += mixed(data + 16 * i, secret + 16 * i, seed);
  sum = avalanche(sum);
  for (int i = 8; i < (int)(size / 16); i++) sum += mixed(data + 16 * i, secret + 16 * (i - 8) + 3, seed);
  return avalanche(sum + mixed(end - 16, secret + 136 - 17, seed));
}

static void make_secret(uint8_t *secret, uint64_t seed) {
  for (int i = 0; i < SECRET; i += 16) {
    uint64_t low = word(DEFAULT_SECRET + i) + seed, high = word(DEFAULT_SECRET + i + 8) - seed;
    memcpy(secret + i, &low, 8);
    memcpy(secret + i + 8, &high, 8);
  }
}

static uint64_t digest(const uint8_t *data, size_t size, const uint8_t *secret, Stripes add) {
  uint64_t sums[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
  size_t block = STRIPE * STRIPES, blocks = (size - 1) / block;
  for (size_t i = 0; i < blocks; i++) {
    add(sums, data + i * block, secret, STRIPES);
    scramble(sums, secret + SECRET - STRIPE);
  }
  add(sums, data + blocks * block, secret, (size - 1 - blocks * block) / STRIPE);
  add(sums, data + size - STRIPE, secret + SECRET - STRIPE - 7, 1);
  uint64_t result = size * P64_1;
  for (int i = 0; i < 4; i++)
    result += folded(sums[2 * i] ^ word(secret + 11 + 16 * i), sums[2 * i + 1] ^ word(secret + 19 + 16 * i));
  return avalanche(result);
}

enum { SHORT = 240 };  // bytes that are hashed in another way

PUBLIC uint64_t stoker_digest(const uint8_t *data, size_t size, uint64_t seed) {
  uint8_t secret[SECRET];
  if (size <= SHORT) return short_digest(data, size, seed);
  make_secret(secret, seed);
  return digest(data, size, secret, best_stripes());
}

// ---------------------------------------------------------------------------------------------------------
// Records of shards, each read into its place and compared with its sums while it is in the core's cache.

enum { JOINED = 256 * 1024, BUFFERS = 64 };  // most bytes, and records, of one call to the system
enum { READ = 0, NOT_READ = 1, WRONG = 2 };

static int matches(const uint8_t *data, size_t size, size_t block, uint64_t seed, const uint8_t *secret,
    const uint64_t *sums, Stripes add) {
  for (size_t at = 0; at < size; at += block) {
    size_t some = size - at < block ? size - at : block;
    uint64_t found = some > SHORT ? digest(data + at, some, secret, add) : short_digest(data + at, some, seed);
    if (found != word(sums++)) return 0;
  }
  return 1;
}

// Fills buffers from neighbors in a file; returns whether all bytes came.
static int filled(int fd, int64_t offset, struct iovec *into, int count, size_t bytes, int flags) {
  while (bytes) {
    long got = syscall(SYS_preadv2, (long)fd, into, (long)count, (long)offset, 0L, (long)flags);
    if (got <= 0) return 0;
    bytes -= (size_t)got;
    offset += got;
    for (; count && (size_t)got >= into->iov_len; count--) got -= (long)into++->iov_len;
    if (count) {
      into->iov_base = (char *)into->iov_base + got;
      into->iov_len -= (size_t)got;
    }
  }
  return 1;
}

// A record that is larger than what is read in one call comes in pieces of whole blocks.
static int read_large(int fd, int64_t offset, uint8_t *out, size_t size, size_t block, uint64_t seed,
    const uint8_t *secret, const uint64_t *sums, int flags, Stripes add) {
  size_t piece = block > JOINED ? block : JOINED / block * block;
  for (size_t at = 0; at < size; at += piece) {
    size_t some = size - at < piece ? size - at : piece;
    struct iovec into = {out + at, some};
    if (!filled(fd, offset + (int64_t)at, &into, 1, some, flags)) return NOT_READ;
    if (sums && !matches(out + at, some, block, seed, secret, sums + at / block, add)) return WRONG;
  }
  return READ;
}

// Has the system begin to load what will be read, so that more is under way than there are threads.
PUBLIC void stoker_announce(size_t count, const int32_t *fds, const int64_t *offsets, const int64_t *sizes) {
  for (size_t i = 0; i < count; i++) (void)posix_fadvise(fds[i], offsets[i], sizes[i], POSIX_FADV_WILLNEED);
}

// `seeds` and `sums`: where those of each record are, the sum of its first block; null: nothing is checked.
// Returns how many records were not read, or are wrong; `states` says which.
PUBLIC int64_t stoker_read(size_t count, const int32_t *fds, const int64_t *offsets, const int64_t *sizes,
    uint8_t *const *outs, size_t block, const uint64_t *const *seeds, const uint64_t *const *sums, int flags,
    uint8_t *states) {
  Stripes add = best_stripes();
  uint8_t secret[SECRET];
  int64_t failed = 0;
  for (size_t i = 0, next; i < count; i = next) {
    struct iovec into[BUFFERS];
    size_t bytes = 0;
    for (next = i; next < count && next - i < BUFFERS; next++) {
      if (next > i && (fds[next] != fds[i] || offsets[next] != offsets[i] + (int64_t)bytes ||
                       bytes + (size_t)sizes[next] > JOINED))
        break;
      into[next - i].iov_base = outs[next];
      into[next - i].iov_len = (size_t)sizes[next];
      bytes += (size_t)sizes[next];
    }
    int got = bytes <= JOINED && filled(fds[i], offsets[i], into, (int)(next - i), bytes, flags);
    for (size_t j = i; j < next; j++) {
      uint64_t seed = sums ? word(seeds[j]) : 0;
      const uint64_t *own = sums ? sums[j] : NULL;
      size_t size = (size_t)sizes[j];
      if (sums && size > SHORT) make_secret(secret, seed);
      if (bytes > JOINED)
        states[j] = (uint8_t)read_large(fds[j], offsets[j], outs[j], size, block, seed, secret, own, flags, add);
      else
        states[j] = !got ? NOT_READ : own && !matches(outs[j], size, block, seed, secret, own, add) ? WRONG : READ;
      failed += states[j] != READ;
    }
  }
  return failed;
}
