// Tokens of 32 sequences, a tile, in shared memory: a piece of the context at a time, copied asynchronously
// into a ring of stages while an earlier piece is read. The query is the last token where the call sees it.
//
// Sequence s starts at float s * stride of a stage, and its tokens follow each other m floats apart. Tokens
// that lie one after another in memory are copied by 16 bytes, whole ones, so that a piece may bring up to
// three floats more at both ends: rows of a stage lie alike to multiples of 16 bytes in both memories, and
// far enough apart. Those that do not start at a multiple of 16 bytes, the last tile, whose memory ends, and
// the last piece where something follows the tokens are copied by 4 bytes; so are rows apart, in more steps.
//
// A lane reads its own sequence, so the stride decides how lanes meet in banks:
//
//   floats from sequence to sequence in memory    stride        lanes read, and take turns
//   odd                                           odd           4 bytes, none
//   2 (mod 4)                                     2 (mod 4)     8 bytes, none
//   0 (mod 4)                                     4 (mod 8)     8 bytes, two lanes
//   copies of 4 bytes alone                       odd           4 bytes, none
//
// Widths that are not compiled, 21 and 33 are read by 4 bytes: two lanes meet at 2 (mod 4), and 0 (mod 4) is
// copied by 4 bytes, where four would.
#pragma once

#include "cuda/device.cuh"

namespace fastlin {
namespace cuda {
namespace {

constexpr int kTile = 32, kWarps = 4, kThreads = 32 * kWarps;  // sequences of a tile; a block
// Of the ring: one is read, two are on their way. A100 and H100 need 12 and 25 KB a multiprocessor on their
// way at full bandwidth and 0.7 and 1 us of latency.
constexpr int kStages = 3;
constexpr int kTeam = 8, kTeams = kThreads / kTeam;  // lanes that copy a sequence together: 128 bytes

struct alignas(8) Two {
  float x[2];
};

// How the tokens of a call are cut.
struct Pieces {
  int all;       // tokens of a sequence, with the query that counts as one
  int tokens;    // of a piece but the last; a multiple of those that a warp takes at a time
  int count;     // of a sequence: one at least
  int stride;    // floats from sequence to sequence in a stage
  int loads;     // floats that a lane can load at a time: 2 or 1
  int heads;     // places for queries, targets and tasks of a tile
  bool quads;    // copies of 16 bytes
  bool follows;  // something follows the tokens of the last piece: the query, or zeros

  __host__ __device__ int stage_floats() const { return kTile * stride; }
};

// Tokens that a warp takes at a time: two of an odd width are a multiple of 8 bytes.
template <int M>
constexpr int kTokens = M <= 12 ? 2 : 1;

// Whether lanes can read 8 bytes at a time, of width m = M.
template <int M>
constexpr bool kReadsPairs = kTokens<M> * M % 2 == 0;
// Floats of a query in shared memory: lanes with queries of their own meet in no bank.
template <int M>
constexpr int kQuery = M | 1;
// Of the queries, targets (or slopes) and tasks of a tile.
template <int M>
constexpr int kHead = kTile * (kQuery<M> + 2);

// The stride of `floats` floats that are copied by 16 bytes, from sequences apart (mod 4) floats from each
// other: sequence s starts s apart (mod 4) floats behind a multiple of 16 bytes, and no two share one.
inline int stride_of(int floats, int apart) {
  const int rounded = (floats + 3) / 4 * 4;
  if (apart == 0) return rounded % 8 == 4 ? rounded : rounded + 4;
  const int least = apart == 1 ? floats + 4 : rounded + apart;
  return least + (4 + apart - least % 4) % 4;
}

// Of all layouts.
inline int widest_stride(int floats) {
  return std::max(
      {stride_of(floats, 0), stride_of(floats, 1), stride_of(floats, 2), stride_of(floats, 3), floats | 1});
}

// `first` is the first sequence of the call that is read, `most` the tokens of a piece, a power of two.
template <int M>
Pieces cut(const Problem<float>& P, std::int64_t first, int most) {
  Pieces how{};
  how.all = static_cast<int>(P.n) + (P.see_query ? 1 : 0);
  how.count = std::max((how.all + most - 1) / most, 1);
  how.tokens = how.count > 1 ? most : (how.all + kTokens<M> - 1) / kTokens<M> * kTokens<M>;
  how.heads = how.count < kStages ? kStages : 1;
  how.follows = how.all != P.n || how.all % kTokens<M> != 0;
  const auto address =
      reinterpret_cast<std::uintptr_t>(P.x) + 4 * static_cast<std::uintptr_t>(first * P.x_batch);
  const int apart = static_cast<int>(P.x_batch % 4), floats = how.tokens * static_cast<int>(P.m);
  const bool reads_pairs = kReadsPairs<M> && P.m == M;
  how.quads = P.x_row == P.m && P.n > 0 && P.x_batch >= P.n * P.m && address % 16 == 0 &&
              (how.count == 1 || floats % 4 == 0) && (apart != 0 || reads_pairs);
  how.stride = how.quads ? stride_of(floats, apart) : floats | 1;
  how.loads = reads_pairs && how.stride % 2 == 0 ? 2 : 1;
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

// Begins to copy a piece of the tile at `place` to a stage, and with its first piece queries, targets or
// slopes, and tasks to `head`. Sequences from `end` on are not read. kMost: tokens of the longest piece.
template <int M, int kMost>
__device__ inline void copy_piece(const Problem<float>& P, const Pieces& how, const Place& place,
                                  std::int64_t end, float* stage, float* head) {
  const int thread = static_cast<int>(threadIdx.x), team = thread / kTeam, lane = thread % kTeam;
  const int m = static_cast<int>(P.m), n = static_cast<int>(P.n);
  const int sequences = static_cast<int>(end - place.first < kTile ? end - place.first : kTile);
  const int begin = place.piece * how.tokens, tokens = std::min(how.tokens, n - begin);
  const bool follows = place.piece == how.count - 1 && how.follows;
  const float* tile = P.x + (n > 0 ? place.first * P.x_batch + begin * P.x_row : 0);
  if (how.quads && !follows && place.first + kTile < P.B) {
    // Sequences kTeams apart lie alike: 16 rows are a multiple of 16 bytes.
    const int before = static_cast<int>(team * P.x_batch) & 3, quads = (before + tokens * m + 3) / 4;
    float* to = stage + team * how.stride - before + 4 * lane;
    const float* from = tile + team * P.x_batch + 4 * lane - before;
    FASTLIN_UNROLL
    for (int half = 0; half < kTile / kTeams; ++half) {
      FASTLIN_UNROLL
      for (int i = 0; i < (kMost * M + 6) / 4; i += kTeam) {
        if (i + lane < quads) __pipeline_memcpy_async(to + 4 * i, from + 4 * i, 16);
      }
      to += kTeams * how.stride, from += kTeams * P.x_batch;
    }
  } else if (P.x_row == P.m) {
    const int own = thread % 32, floats = tokens * m;
    FASTLIN_NO_UNROLL
    for (int s = thread / 32; s < sequences; s += kWarps) {
      float* to = stage + s * how.stride + own;
      const float* from = tile + s * P.x_batch + own;
      FASTLIN_UNROLL
      for (int i = 0; i < kMost * M; i += 32) {
        if (i + own < floats) __pipeline_memcpy_async(to + i, from + i, 4);
      }
    }
  } else {
    // Opaque: else the compiler keeps the quotients in registers, and spills others.
    const int width = opaque(m), row = static_cast<int>(P.x_row);
    FASTLIN_NO_UNROLL
    for (int s = team; s < sequences; s += kTeams) {  // rows apart
      const float* from = tile + s * P.x_batch;
      FASTLIN_NO_UNROLL
      for (int i = lane, t = lane / width, j = lane % width; t < tokens; i += kTeam) {
        __pipeline_memcpy_async(stage + s * how.stride + i, from + t * row + j, 4);
        for (j += kTeam; j >= width; j -= width) ++t;
      }
    }
  }
  if (follows) {
    // The query, and zeros up to a whole number of tokens that a warp takes.
    const int zeros = how.all % kTokens<M> != 0 ? m : 0;
    FASTLIN_NO_UNROLL
    for (int s = team; s < sequences; s += kTeams) {  // what follows
      float* to = stage + s * how.stride;
      const float* query = P.q + (place.first + s) * P.q_batch;
      FASTLIN_NO_UNROLL
      for (int j = lane; j < m && P.see_query; j += kTeam) {
        __pipeline_memcpy_async(to + tokens * m + j, query + j, 4);
      }
      FASTLIN_NO_UNROLL
      for (int j = lane; j < zeros; j += kTeam) to[(how.all - begin) * m + j] = 0;
    }
  }
  if (place.piece > 0) return;
  FASTLIN_NO_UNROLL
  for (int s = team; s < sequences; s += kTeams) {  // queries
    const float* query = P.q + (place.first + s) * P.q_batch;
    FASTLIN_NO_UNROLL
    for (int j = lane; j < m; j += kTeam) __pipeline_memcpy_async(head + s * kQuery<M> + j, query + j, 4);
  }
  if (thread < sequences) {
    const std::int64_t sequence = place.first + thread;
    float* scalars = head + kTile * kQuery<M> + thread;
    const float* target = P.y != nullptr ? P.y : P.gy;
    if (target != nullptr) __pipeline_memcpy_async(scalars, target + sequence, 4);
    // Of an index below 8 the first half is enough.
    if (P.task != nullptr) __pipeline_memcpy_async(scalars + kTile, P.task + sequence, 4);
  }
}

// Zeros to shared memory, for what copies leave out: all threads of the block.
__device__ inline void clear(float* to, int quads) {
  FASTLIN_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < quads; i += kThreads) store_quad(to + 4 * i, Quad{});
}

// The least width that is compiled as M.
template <int M>
constexpr int kNarrowest = M == 33   ? 23
                           : M == 22 ? 22
                           : M == 21 ? 13
                           : M == 12 ? 12
                           : M == 11 ? 8
                           : M == 7  ? 7
                                     : 1;

// kTokens tokens of a lane's sequence, with zeros beyond width m; of width M pairs of floats, if they are so.
template <int M, int kLoads>
__device__ inline void load_tokens(const float* from, int m, float (&x)[kTokens<M> * M]) {
  if constexpr (kLoads == 2) {
    FASTLIN_UNROLL
    for (int i = 0; i < kTokens<M> * M; i += 2) {
      const Two two = *reinterpret_cast<const Two*>(from + i);
      x[i] = two.x[0], x[i + 1] = two.x[1];
    }
  } else {
    FASTLIN_UNROLL
    for (int t = 0; t < kTokens<M>; ++t) {
      FASTLIN_UNROLL
      for (int j = 0; j < M; ++j) x[t * M + j] = j < kNarrowest<M> || j < m ? from[t * m + j] : 0.0f;
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
