// Drawing sequences on a GPU, for drawn.cu and form_drawn.cu; of form.cu, their tasks. The numbers are those
// of core/sampler-inl.h, bit for bit: the same Philox, Box-Muller and chi variates, on single numbers.
//
// Lane = sequence: numbers of a sequence are a column of shared memory, [entries, lanes] floats, where no two
// lanes meet in a bank. What depends on the block of a draw alone is computed once for a block of threads: a
// table of Philox blocks after two rounds, with the entries that their draws go to, and of the constants of
// chi variates. A table's row is one broadcast of 128 bits.
//
// Instructions, sm_90: 2 Philox blocks and their 8 normals 304; 2 chi variates, first attempts in float, 241.
// Two blocks at a time are two chains of products, which with four warps a scheduler keep it busy. An attempt
// that float does not settle is left to a second loop, once in 840 chi variates of 50 degrees, in 320 of 20:
// it makes the second attempt, and at last follows the definition in double.
#pragma once

// clang-format off: the first defines the macros of csrc/core.
#include "cuda/device.cuh"
#include "core/arena.h"
// clang-format on

namespace fastlin {
namespace cuda {
namespace {
// clang-format off: each file uses those before it.
#include "cuda/vec_warp.h"
#include "core/parts-inl.h"
#include "core/philox-inl.h"
#include "core/normal-inl.h"
#include "core/chi-inl.h"
#include "core/tile-inl.h"
#include "cuda/tile_warp.h"
#include "core/draws-inl.h"
#include "core/sampler-inl.h"
// clang-format on

using Word = Vec<std::uint32_t>;
using WideWord = Vec<std::uint64_t>;
using WidePhilox = Philox<WideWord>;
using DrawnSequence = PhiloxSequence<WideWord>;
using Sections = Sampler<float>;

__device__ inline WidePhilox philox_of(const Source& source) {
  return WidePhilox(source.seed, current_step(source), source.stream);
}

// The same for a kernel's argument: its keys are then operands in constant memory, and take no registers. It
// does not know the step, which only Philox::block uses.
inline WidePhilox keys_of(const Source& source) { return WidePhilox(source.seed, 0, source.stream); }

// Sequence i of the call.
__device__ inline DrawnSequence sequence_of(const WidePhilox& philox, const Source& source, std::int64_t i) {
  return philox.sequence(WideWord::set(source.offset + static_cast<std::uint64_t>(i)));
}

__device__ FASTLIN_INLINE Word word_of(WideWord word) { return {static_cast<std::uint32_t>(word.x)}; }

__device__ inline int drawn_task(const WidePhilox& philox, const DrawnSequence& sequence,
                                 const Source& source, std::int64_t i) {
  if (source.K == 1) return 0;
  WideWord c[1][4] = {};
  if (source.strata == nullptr) {
    philox.start(sequence, philox_of(source).block(Sections::block(Sections::kTask)), c[0]);
    philox.finish(c);
  }
  return static_cast<int>(Sections::task(source, i, word_of(c[0][0]).x));
}

// Task of sequence i of the call.
__device__ inline int drawn_task(const Source& source, std::int64_t i) {
  const WidePhilox philox = philox_of(source);
  return drawn_task(philox, sequence_of(philox, source, i), source, i);
}

constexpr int round_up(int count, int to) { return (count + to - 1) / to * to; }

// How the factor of a context is drawn: `constant` rows of the constant coordinate, then `rank` rows with
// degrees of freedom below, below - 1, ... on the diagonal.
struct FactorShape {
  int d, constant, rank;
  bool noisy;
  std::int64_t below;

  FASTLIN_HD explicit FactorShape(const Source& source)
      : d(static_cast<int>(source.d)),
        constant(source.bias && source.n > 0 ? 1 : 0),
        rank(static_cast<int>(source.n - constant < source.d ? source.n - constant : source.d)),
        noisy(source.noise_std != 0),
        below(source.n - constant) {}

  FASTLIN_HD int rows() const { return constant + rank; }
  // Normals before row i, i <= rank, of those below the constant coordinate's.
  FASTLIN_HD int normals_before(int i) const { return constant * d + i * d - i * (i + 1) / 2; }
  // Chi variates: the diagonal and, in slot `rank` of the table, the remainder of the labels' noise.
  FASTLIN_HD int slots() const { return rank + (noisy ? 1 : 0); }
  FASTLIN_HD std::uint32_t chi_block(int slot) const {
    return Sections::block(Sections::kChi) +
           static_cast<std::uint32_t>(kBlocksPerChi * (slot < rank ? slot : d));
  }
  // The slot with one degree of freedom, if any.
  FASTLIN_HD int slot_of_one() const { return below <= d + 1 ? static_cast<int>(below) - 1 : -1; }
};

// Whether beta is drawn, and not the mean of a fixed task.
FASTLIN_HD inline bool draws_beta(const Source& source) {
  return source.factors != nullptr || source.means == nullptr;
}

// A Philox block after two rounds, without its sequence's part; its first draw goes to number `at` of the
// lane's column.
struct alignas(16) DrawBlock {
  std::uint32_t word0, word1, word2;
  int at;
};

struct alignas(16) ChiSlot {
  DrawBlock block;
  FloatFreedom constants;
};

__device__ inline DrawBlock draw_block(const WidePhilox& philox, std::uint32_t block, int at) {
  const PhiloxBlock shared = philox.block(block);
  return {shared.word0, shared.word1, shared.word2, at};
}

// The table of blocks, which the threads of a block write together; all of them count.
class BlockTable {
 public:
  __device__ BlockTable(DrawBlock* blocks, const WidePhilox& philox, int thread, int threads)
      : blocks_(blocks), philox_(philox), thread_(thread), threads_(threads) {}

  // Blocks first, ..., first + count - 1; draws are `lanes` numbers apart, and go round in `ring` entries
  // that start at entry `at`, from `begin` on.
  __device__ void add(std::uint32_t first, int count, int lanes, int at, int begin, int ring) {
    FASTLIN_NO_UNROLL
    for (int i = thread_; i < count; i += threads_) {
      const int entry = at + (begin + 4 * i) % ring;
      blocks_[count_ + i] = draw_block(philox_, first + static_cast<std::uint32_t>(i), entry * lanes);
    }
    count_ += count;
    last_ = first + static_cast<std::uint32_t>(count - 1);
    last_at_ = (at + (begin + 4 * (count - 1)) % ring) * lanes;
  }
  __device__ void add(std::uint32_t first, int draws, int lanes, int at) {
    const int count = (draws + 3) / 4;
    if (count > 0) add(first, count, lanes, at, 0, 4 * count);
  }

  // Pairs of blocks so far; the last block fills up the last pair.
  __device__ int pairs() {
    if (count_ % 2 != 0) {
      if (thread_ == 0) blocks_[count_] = draw_block(philox_, last_, last_at_);
      ++count_;
    }
    return count_ / 2;
  }

 private:
  DrawBlock* blocks_;
  const WidePhilox& philox_;
  int thread_, threads_, count_ = 0, last_at_ = 0;
  std::uint32_t last_ = 0;
};

// The table of chi variates [slots, whole pairs]: slot i of the diagonal goes to entry `at` + i, the
// remainder to `at` + d.
__device__ inline void write_slots(ChiSlot* slots, const FactorShape& shape, const WidePhilox& philox,
                                   int lanes, int at, int thread, int threads) {
  FASTLIN_NO_UNROLL
  for (int i = thread; i < round_up(shape.slots(), 2); i += threads) {
    const int slot = i < shape.slots() ? i : shape.slots() - 1;
    slots[i] = {
        draw_block(philox, shape.chi_block(slot), (at + (slot < shape.rank ? slot : shape.d)) * lanes),
        Freedom(shape.below - slot)};
  }
}

// The words of two blocks of a sequence.
__device__ FASTLIN_INLINE void draw_words(const WidePhilox& philox, const DrawnSequence& sequence,
                                          const DrawBlock& first, const DrawBlock& second,
                                          WideWord (&c)[2][4]) {
  philox.start(sequence, {first.word0, first.word1, first.word2}, c[0]);
  philox.start(sequence, {second.word0, second.word1, second.word2}, c[1]);
  philox.finish(c);
}

// The normals of pairs begin, begin + step, ... of a table, in the lane's own column of shared memory.
template <int kLanes>
__device__ FASTLIN_INLINE void draw_normals(const WidePhilox& philox, const DrawnSequence& sequence,
                                            const DrawBlock* blocks, int begin, int end, int step,
                                            float* own) {
  FASTLIN_NO_UNROLL
  for (int pair = begin; pair < end; pair += step) {
    const DrawBlock block[2] = {blocks[2 * pair], blocks[2 * pair + 1]};
    WideWord c[2][4];
    draw_words(philox, sequence, block[0], block[1], c);
    FASTLIN_UNROLL
    for (int i = 0; i < 4; ++i) {
      Vec<float> even, odd;
      box_muller(word_of(c[i / 2][i % 2 * 2]), word_of(c[i / 2][i % 2 * 2 + 1]), even, odd);
      float* to = own + block[i / 2].at + i % 2 * 2 * kLanes;
      to[0] = even.x;
      to[kLanes] = odd.x;
    }
  }
}

// A chi variate by the definition, in double; `block` is the first of its slot.
__device__ inline float chi_by_definition(const WidePhilox& philox, const DrawnSequence& sequence,
                                          const Source& source, std::uint32_t block, std::int64_t degrees) {
  using D = Vec<double>;
  const Freedom freedom(degrees);
  Chi<D, WideWord> chi(D::set(freedom.k), D::set(freedom.shape), D::set(freedom.scale));
  bool needs_block = true;
  FASTLIN_NO_UNROLL
  for (std::uint32_t j = 0; needs_block && j < kBlocksPerChi; ++j) {
    WideWord c[1][4];
    philox.start(sequence, philox_of(source).block(block + j), c[0]);
    philox.finish(c);
    needs_block = chi.block(c[0]);
  }
  return static_cast<float>(chi.value.x);
}

// Chi variates of pairs begin, begin + step, ... of a table, as Lanes<float>::chi has them: the first attempt
// in float, where that is not settled the second, then the definition.
template <int kLanes>
__device__ FASTLIN_INLINE void draw_chi(const WidePhilox& philox, const DrawnSequence& sequence,
                                        const Source& source, const FactorShape& shape, const ChiSlot* slots,
                                        int begin, int step, float* own) {
  const int end = (shape.slots() + 1) / 2, last = shape.slots() - 1, one = shape.slot_of_one();
  unsigned open_pairs = 0, bit = 1;
  FASTLIN_NO_UNROLL
  for (int pair = begin; pair < end; pair += step, bit += bit) {
    const ChiSlot slot[2] = {slots[2 * pair], slots[2 * pair + 1]};
    WideWord c[2][4];
    draw_words(philox, sequence, slot[0].block, slot[1].block, c);
    FASTLIN_UNROLL
    for (int i = 0; i < 2; ++i) {
      Vec<float> x, next, value;
      box_muller(word_of(c[i][0]), word_of(c[i][1]), x, next);
      if (any(float_attempt(x, word_of(c[i][2]), slot[i].constants, value))) open_pairs |= bit;
      own[slot[i].block.at] = std::min(2 * pair + i, last) == one ? std::fabs(x.x) : value.x;
    }
  }
  FASTLIN_NO_UNROLL
  for (int index = 2 * begin; open_pairs != 0; index += 2 * step, open_pairs >>= 1) {
    FASTLIN_NO_UNROLL
    for (int i = 0; i < 2 * static_cast<int>(open_pairs & 1); ++i) {
      const ChiSlot slot = slots[index + i];
      WideWord c[1][4];
      philox.start(sequence, {slot.block.word0, slot.block.word1, slot.block.word2}, c[0]);
      philox.finish(c);
      Vec<float> x, next, first, second;
      box_muller(word_of(c[0][0]), word_of(c[0][1]), x, next);
      if (!any(float_attempt(x, word_of(c[0][2]), slot.constants, first))) continue;
      const bool unsettled = any(not_surely_rejected(x, word_of(c[0][2]), slot.constants) |
                                 float_attempt(next, word_of(c[0][3]), slot.constants, second));
      float value = second.x;
      if (unsettled) {
        const int number = std::min(index + i, last);
        value = chi_by_definition(philox, sequence, source, shape.chi_block(number), shape.below - number);
      }
      own[slot.block.at] = value;
    }
  }
}

// Entry i of a matrix [d, d], with rows of whole quads, as float.
template <int d>
__device__ inline float matrix_entry(const double* matrix, int i) {
  const int row = i / round_up(d, 4), column = i % round_up(d, 4);
  return column < d ? static_cast<float>(matrix[row * d + column]) : 0.0f;
}

// F<M, bias>::call(given...) for the source's width, or `otherwise` for a width that is not compiled.
template <template <int, bool> class F, class Value, class... Given>
Value for_width(const Source& source, Value otherwise, const Given&... given) {
  switch (2 * source.d + (source.bias ? 1 : 0)) {
#define FASTLIN_WIDTH(M)                \
  case 2 * (M - 1):                     \
    return F<M, false>::call(given...); \
  case 2 * (M - 2) + 1:                 \
    return F<M, true>::call(given...)
    FASTLIN_WIDTH(6);
    FASTLIN_WIDTH(7);
    FASTLIN_WIDTH(11);
    FASTLIN_WIDTH(12);
    FASTLIN_WIDTH(21);
    FASTLIN_WIDTH(22);
    FASTLIN_WIDTH(33);
#undef FASTLIN_WIDTH
  }
  return otherwise;
}

}  // namespace
}  // namespace cuda
}  // namespace fastlin
