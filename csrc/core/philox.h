// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
// Every random number of fastlin is a pure function of (seed, step, stream, sequence, draw):
//
//   key      word 0   seed, low 32 bits
//            word 1   seed, high 32 bits
//   counter  word 0   draw block, 24 bits         | (stream & 0xff) << 24
//            word 1   sequence, low 32 bits
//            word 2   sequence, high 32 bits
//            word 3   step, 24 bits               | (stream >> 8) << 24
//
// The stream has 16 bits. Draw j of a sequence is word j % 4 of block j / 4, so a sequence has 2^26 draws.
//   uniform j        u_j = (w_j + 1/2) 2^-32
//   normals 2i,2i+1  r cos(2 pi u_{2i+1}), r sin(2 pi u_{2i+1})   with r = sqrt(-2 log u_{2i})
// Both are evaluated in double and rounded once to the dtype that is asked for.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define FASTLIN_HD __host__ __device__
#else
#define FASTLIN_HD
#endif

namespace fastlin {

struct Counter {
  std::uint32_t word[4];
};

struct Key {
  std::uint32_t word[2];
};

constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 24;
constexpr std::int64_t kMaxSteps = std::int64_t{1} << 24;
constexpr std::int64_t kMaxStreams = std::int64_t{1} << 16;

// Functions here are static: each translation unit keeps its own copy, so one that is compiled for a newer
// instruction set never becomes the copy that the linker gives to all.

FASTLIN_HD static inline Key key_of(std::uint64_t seed) {
  return {{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)}};
}

FASTLIN_HD static inline Counter counter_of(std::uint32_t block, std::uint64_t sequence, std::uint32_t stream,
                                            std::uint32_t step) {
  return {{block | (stream & 0xffu) << 24, static_cast<std::uint32_t>(sequence),
           static_cast<std::uint32_t>(sequence >> 32), step | (stream >> 8) << 24}};
}

FASTLIN_HD static inline Counter philox4x32(Counter c, Key k) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t even = std::uint64_t{0xD2511F53u} * c.word[0];
    const std::uint64_t odd = std::uint64_t{0xCD9E8D57u} * c.word[2];
    c = {{static_cast<std::uint32_t>(odd >> 32) ^ c.word[1] ^ k.word[0], static_cast<std::uint32_t>(odd),
          static_cast<std::uint32_t>(even >> 32) ^ c.word[3] ^ k.word[1], static_cast<std::uint32_t>(even)}};
    k.word[0] += 0x9E3779B9u;  // golden ratio
    k.word[1] += 0xBB67AE85u;  // sqrt(3) - 1
  }
  return c;
}

// In (0, 1): w + 1/2 takes 33 of the 53 bits, so nothing is rounded and the logarithm is always finite.
FASTLIN_HD static inline double uniform(std::uint32_t w) { return (w + 0.5) * 0x1p-32; }

FASTLIN_HD static inline void normal_pair(std::uint32_t w0, std::uint32_t w1, double* pair) {  // pair [2]
  constexpr double kTwoPi = 6.283185307179586;
  const double r = std::sqrt(-2.0 * std::log(uniform(w0)));
  const double angle = kTwoPi * uniform(w1);
  pair[0] = r * std::cos(angle);
  pair[1] = r * std::sin(angle);
}

}  // namespace fastlin
