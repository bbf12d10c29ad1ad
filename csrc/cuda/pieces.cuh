// Tokens of 32 sequences, a tile, in shared memory: a piece of the context at a time, copied asynchronously
// into a ring of stages while an earlier piece is read. The query is the last token where the call sees it.
//
// A sequence starts at float 32-bit offset s * stride of a stage, s = 0, ..., 31, and its tokens follow each
// other M floats apart. A lane reads its own sequence, so the stride decides how lanes meet in banks:
//
//   tokens in memory          copies           stride                lanes read, and take turns
//   odd floats a sequence     16 bytes         odd                   4 bytes, none
//   2 (mod 4)                 16 bytes         2 (mod 4)             8 bytes, none
//   0 (mod 4)                 16 bytes         4 (mod 8)             8 bytes, two lanes
//   at a multiple of 8 bytes  8 bytes          2 (mod 4)             8 bytes, none
//   other alignment, padding, or rows apart    odd, 4-byte copies    4 bytes, none
//
// Copies of 16 bytes need a stride that is congruent to that of the sequences in memory, modulo 4 floats;
// what lies before the first and behind the last multiple of 16 bytes is copied by 4 bytes. Where lanes can
// only read 4 bytes (a token of an odd width at a time), 0 (mod 4) takes copies of 8 bytes: two lanes meet,
// not four.
#pragma once

#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kTile = 32, kWarps = 4, kThreads = 32 * kWarps;  // sequences of a tile; a block
// Of the ring: one is read, two are on their way. A100 and H100 need 12 and 25 KB a multiprocessor on their
// way at full bandwidth and 0.7 and 1 us of latency.
constexpr int kStages = 3;
constexpr int kTeam = 8;  // lanes that copy a sequence together: 128 bytes

struct alignas(8) Two {
  float x[2];
};

// How the tokens of a call are cut.
struct Pieces {
  int all;     // tokens of a sequence, with the query that counts as one
  int tokens;  // of a piece but the last; a multiple of those that a warp takes at a time
  int count;   // of a sequence: one at least
  int stride;  // floats from sequence to sequence in a stage
  int copies;  // floats of an asynchronous copy: 4, 2 or 1
  int loads;   // floats that a lane can load at a time: 2 or 1
  int heads;   // places for queries, targets and tasks of a tile

  __host__ __device__ int stage_floats() const { return kTile * stride; }
};

// Tokens that a warp takes at a time: two of an odd width are a multiple of 8 bytes.
template <int M>
constexpr int kTokens = M <= 12 ? 2 : 1;

// Whether lanes can read 8 bytes at a time; and the most floats between sequences of a stage.
template <int M>
constexpr bool kReadsPairs = kTokens<M> * M % 2 == 0;
template <int M>
constexpr int kMostPadding = kReadsPairs<M> ? 7 : 3;

// Floats of a query in shared memory: lanes with queries of their own meet in no bank.
template <int M>
constexpr int kQuery = M | 1;
// Of the queries, targets (or slopes) and tasks of a tile.
template <int M>
constexpr int kHead = kTile * (kQuery<M> + 2);

// `first` is the first sequence of the call that is read, `most` the tokens of a piece, a power of two.
template <int M>
Pieces cut(const Problem<float>& P, std::int64_t first, int most) {
  Pieces how{};
  how.all = static_cast<int>(P.n) + (P.see_query ? 1 : 0);
  how.count = std::max((how.all + most - 1) / most, 1);
  how.tokens = how.count > 1 ? most : (how.all + kTokens<M> - 1) / kTokens<M> * kTokens<M>;
  how.heads = how.count < kStages ? kStages : 1;
  const auto address =
      reinterpret_cast<std::uintptr_t>(P.x) + 4 * static_cast<std::uintptr_t>(first * P.x_batch);
  const bool dense = P.m == M && P.x_row == M && P.n > 0;
  const int apart = static_cast<int>(P.x_batch % 4);
  how.copies = !dense || address % 8 != 0 ? 1 : address % 16 == 0 ? 4 : 2;
  // Where the next piece starts.
  if (how.count > 1 && how.tokens % 4 != 0) how.copies = std::min(how.copies, how.tokens % 2 == 0 ? 2 : 1);
  if (how.copies == 4 && apart == 0 && !kReadsPairs<M>) how.copies = 2;
  if (how.copies == 2 && apart % 2 != 0) how.copies = 1;
  how.stride = how.tokens * M;
  if (how.copies == 1) {
    how.stride |= 1;
  } else if (how.copies == 2) {
    how.stride += (6 - how.stride % 4) % 4;
  } else {
    const int modulus = apart == 0 ? 8 : 4, wanted = apart == 0 ? 4 : apart;
    how.stride += (modulus + wanted - how.stride % modulus) % modulus;
  }
  how.loads = kReadsPairs<M> && how.stride % 2 == 0 ? 2 : 1;
  return how;
}

// Which piece of which tile: the next one after the pieces of a tile is the first of the next tile.
struct Place {
  std::int64_t first;  // sequence
  int piece = 0;

  __device__ void next(const Pieces& how) {
    if (++piece < how.count) return;
    piece = 0;
    first += kTile;
  }
};

// Copies `count` floats that lie alike to multiples of kFloats in both places: the lanes of a team, lane by
// lane.
template <int kFloats>
__device__ inline void copy_run(float* to, const float* from, int count, int lane) {
  const int misplaced = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) / 4) & (kFloats - 1);
  const int before = std::min((kFloats - misplaced) & (kFloats - 1), count);
  if (lane < before) __pipeline_memcpy_async(to + lane, from + lane, 4);
  const int whole = before + (count - before) / kFloats * kFloats;
  FASTLIN_NO_UNROLL
  for (int i = before + lane * kFloats; i < whole; i += kTeam * kFloats) {
    __pipeline_memcpy_async(to + i, from + i, 4 * kFloats);
  }
  if (whole + lane < count) __pipeline_memcpy_async(to + whole + lane, from + whole + lane, 4);
}

// Begins to copy a piece of the tile at `place` to a stage, and with its first piece queries, targets or
// slopes, and tasks to `head`. Sequences from `end` on are not read.
template <int M>
__device__ inline void copy_piece(const Problem<float>& P, const Pieces& how, const Place& place,
                                  std::int64_t end, float* stage, float* head) {
  const int team = static_cast<int>(threadIdx.x) / kTeam, lane = static_cast<int>(threadIdx.x) % kTeam;
  const int m = static_cast<int>(P.m), n = static_cast<int>(P.n);
  const int sequences = static_cast<int>(end - place.first < kTile ? end - place.first : kTile);
  const int begin = place.piece * how.tokens, tokens = std::min(how.tokens, n - begin);
  const bool is_last = place.piece == how.count - 1;
  FASTLIN_NO_UNROLL
  for (int s = team; s < sequences; s += kThreads / kTeam) {
    const float* from = P.x + (n > 0 ? (place.first + s) * P.x_batch + begin * P.x_row : 0);
    const float* query = P.q + (place.first + s) * P.q_batch;
    float* to = stage + s * how.stride;
    if (how.copies == 4) {
      copy_run<4>(to, from, tokens * m, lane);
    } else if (how.copies == 2) {
      copy_run<2>(to, from, tokens * m, lane);
    } else {
      const int row = static_cast<int>(P.x_row), rows_a_step = kTeam / m, floats_a_step = kTeam % m;
      FASTLIN_NO_UNROLL
      for (int t = lane / m, j = lane % m; t < tokens;) {
        __pipeline_memcpy_async(to + t * M + j, from + t * row + j, 4);
        t += rows_a_step, j += floats_a_step;
        if (j >= m) j -= m, ++t;
      }
    }
    if (is_last) {
      // Behind the tokens: the query, and zeros up to a whole number of those that a warp takes.
      if (P.see_query) {
        FASTLIN_NO_UNROLL
        for (int j = lane; j < m; j += kTeam) __pipeline_memcpy_async(to + tokens * M + j, query + j, 4);
      }
      if (how.all % kTokens<M> != 0) {
        FASTLIN_NO_UNROLL
        for (int j = lane; j < M; j += kTeam) to[(how.all - begin) * M + j] = 0;
      }
    }
    if (place.piece == 0) {
      FASTLIN_NO_UNROLL
      for (int j = lane; j < m; j += kTeam) {
        __pipeline_memcpy_async(head + s * kQuery<M> + j, query + j, 4);
      }
    }
  }
  if (place.piece == 0 && static_cast<int>(threadIdx.x) < sequences) {
    const std::int64_t sequence = place.first + threadIdx.x;
    float* own = head + kTile * kQuery<M> + threadIdx.x;
    const float* target = P.y != nullptr ? P.y : P.gy;
    if (target != nullptr) __pipeline_memcpy_async(own, target + sequence, 4);
    // Of an index below 8 the first half is enough.
    if (P.task != nullptr) __pipeline_memcpy_async(own + kTile, P.task + sequence, 4);
  }
}

// Zeros to shared memory, for what copies leave out: all threads of the block.
__device__ inline void clear(float* to, int quads) {
  FASTLIN_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < quads; i += kThreads) store_quad(to + 4 * i, Quad{});
}

// kTokens tokens of a lane's sequence, of which kLoads floats are loaded at a time.
template <int M, int kLoads>
__device__ inline void load_tokens(const float* from, float (&x)[kTokens<M> * M]) {
  if constexpr (kLoads == 2) {
    FASTLIN_UNROLL
    for (int i = 0; i < kTokens<M> * M; i += 2) {
      const Two two = *reinterpret_cast<const Two*>(from + i);
      x[i] = two.x[0], x[i + 1] = two.x[1];
    }
  } else {
    FASTLIN_UNROLL
    for (int i = 0; i < kTokens<M> * M; ++i) x[i] = from[i];
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
