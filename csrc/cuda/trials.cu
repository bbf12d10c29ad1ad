// One layer, any number of trials, from records or from stored Gram matrices:
//
//   a = W' q    c = P_k v + G v    yhat = scale a.c    r = dloss/dyhat
//   sums of r q c', r G a, r q, (yhat - y)^2
//
// Blocks. A block has 256 threads, a chunk of sequences and a slab of trials; the slabs of a chunk come one
// after another in the grid, so that they read it from L2. 250 lanes of 256 work for 50 trials: 5 sets of
// them share the sequences of a tile.
//
// Lanes. M <= 12: a lane is a trial. It keeps dW, dv and v in registers, and takes T = 2 sequences at a time
// (M = 12: one). W does not fit beside dW: it is in shared memory, where one 128-bit load serves T sequences.
// G is read as its triangle, as broadcasts of 128 bits: each number serves four multiply-adds, of c_i, c_j,
// e_i and e_j. M = 21, 22 (33): 8 (16) lanes share a trial, each with 3 (2) columns of W and dW in registers
// and the same rows of G, which is whole in shared memory; of a, all lanes read all entries there. 33 = 2 x
// 16 + 1: the lanes share the last column by rows.
//
// Machine code of sm_90 in the loop, a sequence of one trial; gradients, no prompt (several lanes: without
// what only predictions and prompts need):
//
//   M    lanes  registers  instructions  FMAs and products  shared loads  warps a multiprocessor
//   6        1        125           183                166            13  16
//   7        1        154           240                221            16   8
//   11       1        254           560                521            36   8
//   12       1        254           683                616            60   8
//   21       8        246       8 x 350            8 x 268            48   8
//   22       8        250       8 x 360            8 x 280            46   8
//   33      16        255      16 x 415           16 x 302            68   8
//
// At M = 11, R = 50 that is 896 instructions of a warp for a sequence. The copies of a stored matrix add 53,
// its fold 28, tiles and barriers about 20: an H100 issues 2^20 sequences in 1.03 ms (132 multiprocessors, 4
// instructions a clock, 1.98 GHz, 512 chunks in four waves); nothing is counted for waiting. Eight warps
// should do: a loop has ten and more FMAs at any time that do not wait for one another. A prompt adds about
// 30 to 560: q is read a second time, because c0 and the sums of r q take its registers.
//
// Shared memory, 99 KB: parameters of the slab; two tiles of records, which asynchronous copies fill in turn;
// or one tile, and what is copied for the next one. A stored matrix is copied as it is and then folded:
// (G + G') / 2, its triangle. `Control` has what a block knows beside its trials: registers are full.
//
// Tasks. A part of a chunk, at most 2,048 sequences, is sorted by task, so that a tile has one task: v and c0
// change between tiles, and the sums of a task are added where its run of tiles ends.
//
// Sums. A lane adds its sequences in order, a block its sets in order, the parts of a chunk one after
// another. Tiles and sets depend on R and m: the same bits on every GPU, and the same loss with gradients and
// without.
#include "cuda/trials_lanes.cuh"

namespace fastlin {
namespace cuda {
namespace {

// Zeros the block's sums in the chunk's row: [rows, m, m] of dW, and [rows, width] of each task.
__device__ inline void clear_sums(const Work& work, const Plan& plan, float* to) {
  const int r0 = Lane::first(plan), rows = std::min(plan.slab, static_cast<int>(work.P.R) - r0);
  const int m = static_cast<int>(work.P.m), square = work.out.dW != nullptr ? m * m : 0;
  FASTLIN_NO_UNROLL
  for (int i = threadIdx.x; i < rows * square; i += kThreads) {
    to[work.numbers.dW + static_cast<std::int64_t>(r0) * square + i] = 0;
  }
  const int width = static_cast<int>(work.at.width);
  FASTLIN_NO_UNROLL
  for (int k = 0; k < work.P.K; ++k) {
    FASTLIN_NO_UNROLL
    for (int i = threadIdx.x; i < rows * width; i += kThreads) {
      to[work.numbers.sums + (k * work.P.R + r0) * width + i] = 0;
    }
  }
}

template <int M, For kFor>
__global__ void __launch_bounds__(kThreads, M <= 6 && kFor == For::kPlain ? 2 : 1)
    trials_kernel(const __grid_constant__ Work work, const __grid_constant__ Plan plan,
                  std::int64_t first_chunk) {
  using S = Shape<M>;
  using Mapping = std::conditional_t<S::lanes == 1, OneLane<M, kFor>, ManyLanes<M>>;
  FASTLIN_SHARED_MEMORY(memory);
  float* shared = reinterpret_cast<float*>(memory);
  const Problem<float>& P = work.P;
  const Stage<M> stage(work, plan, shared);
  Control* control = stage.control;
  const Lane lane(plan, S::lanes, P.R);

  if (threadIdx.x == 0) {
    const std::int64_t chunk = first_chunk + blockIdx.y, left = P.B - chunk * work.chunk;
    const int size = static_cast<int>(left < work.chunk ? left : work.chunk);
    const int parts = (size + kPart - 1) / kPart;
    control->begin = chunk * work.chunk, control->sums = chunk * work.numbers.count;
    control->chunk_size = size, control->each = (size + parts - 1) / parts;
  }
  load_coefficients(work, control->coefficients, own_thread() / 32, kWarps);
  __syncthreads();
  clear_sums(work, plan, work.partial + control->sums);
  Mapping trial(work, plan, lane, shared);

  FASTLIN_NO_UNROLL
  for (int first = 0; first < control->chunk_size; first = control->next) {
    stage.sort(first);
    // A tile is copied while the one before it is added; before the first there is an empty one. What is
    // known of a tile is read again after its sequences: registers are full while they are added.
    bool goes_on = true;
    FASTLIN_NO_UNROLL
    for (int buffer = 0; goes_on; buffer ^= 1) {
      __pipeline_wait_prior(0);
      __syncthreads();  // this tile is here, and nobody reads the one before
      const Tile* now = control->tiles + buffer;
      if (plan.folds && now->count > 0) {
        stage.fold(now->count, stage.tile(0));
        __syncthreads();
      }
      {
        const Tile next = stage.tile_after(*now);
        if (next.count > 0) stage.copy(next, buffer ^ 1);
        if (threadIdx.x == 0) control->tiles[buffer ^ 1] = next;
      }
      float* tile = stage.tile(plan.folds ? 0 : buffer);
      trial.add(work, plan, lane, now->count, shared, tile,
                [&](int place) { return stage.sequence(now->first + place); });
      now = control->tiles + opaque(buffer);
      const Tile then = stage.tile_after(*now);
      goes_on = then.count > 0;
      if (now->count > 0 && (!goes_on || then.task != now->task)) {
        trial.end_run(work, plan, lane, now->task, tile, work.partial + control->sums);
      }
      if (goes_on && (now->count == 0 || then.task != now->task)) {
        trial.begin_run(work, plan, lane, then.task, shared);
        trial.coefficient = 2 * control->coefficients[then.task];
      }
    }
    trial.end_part(work, plan, lane, stage.tile(0), work.partial + control->sums);
  }
}

}  // namespace

template <int M>
Plan Plan::of(const Problem<float>& P, bool has_records) {
  using S = Shape<M>;
  // Instructions, about: of a block to copy and fold a sequence, and for a tile; of a lane to add a sequence.
  constexpr int kStage = M * M / 2, kTile = 1600, kAdd = 5 * M * S::columns;
  constexpr int kReduced = kSummed * kThreads;  // floats in which sets are added, in place of a tile
  Plan plan{};
  plan.scale = static_cast<float>(P.scale);
  const bool in_quads = P.x_batch % 4 == 0 && P.m % 2 == 0 && reinterpret_cast<std::uintptr_t>(P.x) % 16 == 0;
  plan.copies = P.x_row != P.m ? Copies::kRows : in_quads ? Copies::kQuads : Copies::kWhole;
  plan.folds = !has_records || S::lanes > 1;
  // Of a sequence: two buffers of records; or one, and what was copied.
  const int buffers = plan.folds ? 1 : 2;
  const int copied = !plan.folds ? 0 : has_records ? RecordOf<M>::floats : S::stored_floats;
  const int all = (kSharedBytes - static_cast<int>(sizeof(Control))) / 4;
  double least = 0;
  for (std::int64_t most = std::min<std::int64_t>(kThreads / S::lanes, P.R); most > 0; --most) {
    const std::int64_t slabs = (P.R + most - 1) / most;
    const int slab = static_cast<int>((P.R + slabs - 1) / slabs), of_set = slab * S::lanes;
    const int left = all - S::parameters(slab);
    if (left < buffers * kReduced) continue;
    int room = left / (buffers * S::floats + copied);
    if (copied > 0) room = std::min(room, (left - kReduced) / copied);
    room -= 1;  // for the zeros
    const int sets = std::min(kThreads / of_set, room / S::together), tile = sets * S::together;
    if (sets < 1) continue;
    const double of_tile = room / tile * tile, of_sets = sets;
    const double cost = static_cast<double>(slabs) * (kStage + kTile / of_tile + kWarps * kAdd / of_sets);
    if (plan.slab != 0 && cost >= least) continue;
    least = cost;
    plan.slab = slab, plan.slabs = static_cast<int>(slabs), plan.sets = sets, plan.tile = room / tile * tile;
  }
  plan.step = plan.sets * S::together * S::floats;
  plan.tiles = S::parameters(plan.slab);
  plan.buffer = std::max((plan.tile + 1) * S::floats, kReduced);
  plan.copied = plan.tiles + plan.buffer * (plan.folds ? 1 : 2);
  plan.control = plan.copied + (plan.tile + 1) * copied;
  plan.bytes = 4 * plan.control + static_cast<int>(sizeof(Control));
  return plan;
}

namespace {

template <int M>
int launch_width(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  const Plan plan = Plan::of<M>(work.P, work.records != nullptr);
  const auto start = [&](auto kernel) {
    return launch(kernel, dim3(static_cast<unsigned>(plan.slabs), static_cast<unsigned>(chunks)),
                  dim3(kThreads), static_cast<std::size_t>(plan.bytes), stream, work, plan, first_chunk);
  };
  if constexpr (Shape<M>::lanes == 1) {
    if (work.gradients() && work.P.gy == nullptr && work.out.yhat == nullptr) {
      if (work.P.p == nullptr || work.P.t == 0) return start(trials_kernel<M, For::kPlain>);
      if constexpr (M <= 11) {  // of width 12 it would need six registers more than there are
        if (work.at.q >= 0) return start(trials_kernel<M, For::kPrompted>);
      }
    }
  }
  return start(trials_kernel<M, For::kAll>);
}

}  // namespace

int launch_trials(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  if (chunks == 0) return 0;
  return with_width(
      work.P.m, [&](auto M) { return launch_width<decltype(M)::value>(work, first_chunk, chunks, stream); });
}

bool trials_serve(const Problem<float>& P, const Results<float>& out) {
  constexpr std::int64_t kMostStride = std::int64_t{1} << 31;  // the kernel multiplies 32-bit numbers
  const bool is_near = std::max(P.x_batch, P.q_batch) < kMostStride;
  return P.layers == 0 && P.H == 1 && P.h == nullptr && out.dx == nullptr && out.dq == nullptr && P.R >= 1 &&
         P.K <= kMostTasks && width_for(P.m) != 0 && (!P.is_gram || is_near);
}

}  // namespace cuda
}  // namespace fastlin
