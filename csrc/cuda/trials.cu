#include "cuda/trials_lanes.cuh"

namespace fastlin {
namespace cuda {
namespace {

// Zeros the block's sums in the chunk's row: [rows, m, m] of dW, and [rows, width] of each task.
__device__ inline void clear_sums(const Work& work, int r0, int rows, float* to) {
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

template <int M, bool kPlain>
__global__ void __launch_bounds__(kThreads, 1)
    trials_kernel(const __grid_constant__ Work work, const __grid_constant__ Plan plan, std::int64_t first_chunk) {
  using S = Shape<M>;
  using Mapping = std::conditional_t<S::lanes == 1, OneLane<M, kPlain>, ManyLanes<M>>;
  FASTLIN_SHARED_MEMORY(memory);
  float* shared = reinterpret_cast<float*>(memory);
  const Problem<float>& P = work.P;
  const Stage<M> stage(work, plan, shared);
  Control* control = stage.control;
  const Lane lane(plan, S::lanes, P.R);

  {
    const std::int64_t chunk = first_chunk + blockIdx.y, sums = chunk * work.numbers.count;
    if (threadIdx.x == 0) {
      const std::int64_t left = P.B - chunk * work.chunk;
      const int size = static_cast<int>(left < work.chunk ? left : work.chunk), parts = (size + kPart - 1) / kPart;
      control->begin = chunk * work.chunk, control->sums = sums;
      control->chunk_size = size, control->each = (size + parts - 1) / parts;
    }
    const int r0 = Lane::first(plan);
    clear_sums(work, r0, std::min(plan.slab, static_cast<int>(P.R) - r0), work.partial + sums);
    load_coefficients(work, control->coefficients, threadIdx.x / 32, kWarps);
  }
  Mapping trial(work, plan, lane, shared);
  __syncthreads();

  FASTLIN_NO_UNROLL
  for (int first = 0; first < control->chunk_size; first = control->next) {
    stage.sort(first);
    // A tile is copied while the one before it is added; before the first there is an empty one. What is known
    // of a tile is read again after its sequences: registers are full while they are added.
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
      const Tile next = stage.tile_after(*now);
      goes_on = next.count > 0;
      if (now->count > 0 && (!goes_on || next.task != now->task)) {
        trial.end_run(work, plan, lane, now->task, tile, work.partial + control->sums);
      }
      if (goes_on && (now->count == 0 || next.task != now->task)) {
        trial.begin_run(work, plan, lane, next.task, shared);
        trial.coefficient = 2 * control->coefficients[next.task];
      }
    }
    trial.end_part(work, plan, lane, stage.tile(0), work.partial + control->sums);
  }
}

}  // namespace

template <int M>
Plan Plan::of(const Problem<float>& P, bool has_records) {
  using S = Shape<M>;
  constexpr int kStage = M * M / 3, kLoop = 5 * M * S::columns;  // instructions of a sequence, about
  constexpr int kReduced = kSummed * kThreads;                        // floats in which sets are added
  Plan plan{};
  plan.scale = static_cast<float>(P.scale);
  const bool in_quads = P.x_batch % 4 == 0 && P.m % 2 == 0 && reinterpret_cast<std::uintptr_t>(P.x) % 16 == 0;
  plan.copies = P.x_row != P.m ? Copies::kRows : in_quads ? Copies::kQuads : Copies::kWhole;
  plan.folds = !has_records || S::lanes > 1;
  const int copied = !plan.folds ? 0 : has_records ? RecordOf<M>::floats : S::stored_floats;
  const int all = (kSharedBytes - static_cast<int>(sizeof(Control))) / 4;
  double least = 0;
  for (int slabs = 1, R = static_cast<int>(P.R); slabs <= R; ++slabs) {
    const int slab = (R + slabs - 1) / slabs, most = kThreads / (slab * S::lanes);
    if (most == 0) continue;
    const int left = all - S::parameters(slab);
    // Of a tile and the zeros behind it: two buffers of records, or one and what was copied.
    const int each = plan.folds ? S::floats + copied : 2 * S::floats;
    const int tile = left / each - 1, sets = std::min(most, tile / S::together);
    if (tile < S::together || sets * S::together * 2 > std::max(tile, 2 * S::together)) {
      if (sets < 1 || slab > 1) continue;
    }
    const double cost = slabs * (kStage + 8.0 * kLoop / sets);
    if (plan.slab != 0 && cost >= least) continue;
    least = cost;
    plan.slab = slab, plan.slabs = (R + slab - 1) / slab, plan.sets = sets;
    plan.tile = tile / (sets * S::together) * (sets * S::together);
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
    return launch(kernel, dim3(static_cast<unsigned>(plan.slabs), static_cast<unsigned>(chunks)), dim3(kThreads),
                  static_cast<std::size_t>(plan.bytes), stream, work, plan, first_chunk);
  };
  const bool prompted = work.P.p != nullptr && work.P.t > 0;
  if constexpr (Shape<M>::lanes == 1) {
    if (work.gradients() && work.P.gy == nullptr && work.out.yhat == nullptr && !prompted) {
      return start(trials_kernel<M, true>);
    }
  }
  return start(trials_kernel<M, false>);
}

}  // namespace

int launch_trials(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  if (chunks == 0) return 0;
  switch (width_for(work.P.m)) {
    case 6:
      return launch_width<6>(work, first_chunk, chunks, stream);
    case 7:
      return launch_width<7>(work, first_chunk, chunks, stream);
    case 11:
      return launch_width<11>(work, first_chunk, chunks, stream);
    case 12:
      return launch_width<12>(work, first_chunk, chunks, stream);
    case 21:
      return launch_width<21>(work, first_chunk, chunks, stream);
    case 22:
      return launch_width<22>(work, first_chunk, chunks, stream);
    case 33:
      return launch_width<33>(work, first_chunk, chunks, stream);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

bool trials_serve(const Problem<float>& P, const Results<float>& out) {
  constexpr std::int64_t kMostStride = std::int64_t{1} << 30;  // kernels multiply them as 32-bit numbers
  const bool is_near = std::max(P.x_batch, P.q_batch) < kMostStride && P.R * P.m * P.m < kMostStride;
  return P.layers == 0 && P.H == 1 && P.h == nullptr && out.dx == nullptr && out.dq == nullptr && P.R >= 1 &&
         P.K <= kMostTasks && width_for(P.m) != 0 && (!P.is_gram || is_near);
}

}  // namespace cuda
}  // namespace fastlin
