#include "cuda/trials_lanes.cuh"

namespace fastlin {
namespace cuda {
namespace {

template <int M>
__global__ void __launch_bounds__(kThreads, M <= 7 ? 2 : 1)
    trials_kernel(const __grid_constant__ Work work, const __grid_constant__ Plan plan, std::int64_t first_chunk) {
  using S = Shape<M>;
  using Mapping = std::conditional_t<S::lanes == 1, OneLane<M>, ManyLanes<M>>;
  FASTLIN_SHARED_MEMORY(memory);
  float* shared = reinterpret_cast<float*>(memory);
  const Problem<float>& P = work.P;
  Stage<M> stage(work, plan, shared);
  float* coefficients = reinterpret_cast<float*>(stage.found + kMostTasks * kWarps);

  const std::int64_t chunk = first_chunk + blockIdx.x / plan.slabs;
  const int r0 = static_cast<int>(blockIdx.x) % plan.slabs * plan.slab, of_set = plan.slab * S::lanes;
  Lane lane;
  lane.set = static_cast<int>(threadIdx.x) / of_set;
  lane.trial = static_cast<int>(threadIdx.x) % of_set / S::lanes;
  lane.part = static_cast<int>(threadIdx.x) % S::lanes;
  lane.r = r0 + lane.trial;
  lane.is_real = lane.set < plan.sets && lane.r < P.R;

  float* to = work.partial + chunk * work.numbers.count;
  const int rows = std::min(plan.slab, static_cast<int>(P.R) - r0), m = static_cast<int>(P.m);
  const int square = work.out.dW != nullptr ? rows * m * m : 0, sums = rows * static_cast<int>(work.at.width);
  FASTLIN_NO_UNROLL
  for (int i = threadIdx.x; i < square; i += kThreads) to[work.numbers.dW + r0 * m * m + i] = 0;
  FASTLIN_NO_UNROLL
  for (int k = 0; k < P.K; ++k) {
    FASTLIN_NO_UNROLL
    for (int i = threadIdx.x; i < sums; i += kThreads) {
      to[work.numbers.sums + (k * P.R + r0) * work.at.width + i] = 0;
    }
  }
  const Wanted wanted(work);
  load_coefficients(work, coefficients, threadIdx.x / 32, kWarps);
  Mapping trial(work, plan, lane, shared);

  const std::int64_t begin = chunk * work.chunk, left = P.B - begin;
  const int size = static_cast<int>(left < work.chunk ? left : work.chunk), parts = (size + kPart - 1) / kPart;
  FASTLIN_NO_UNROLL
  for (int part = 0; part < parts; ++part) {
    const int first = static_cast<int>(static_cast<std::int64_t>(size) * part / parts);
    const int end = static_cast<int>(static_cast<std::int64_t>(size) * (part + 1) / parts);
    stage.sort(begin + first, end - first);
    Tile now = stage.tile_at(0, 0);
    stage.copy(now, 0);
    int buffer = 0, task = -1;
    FASTLIN_NO_UNROLL
    while (now.count > 0) {
      if (now.task != task) {
        task = now.task;
        trial.begin_run(work, lane, task);
        trial.coefficient = 2 * coefficients[task];
      }
      const Tile next = stage.tile_at(now.first + now.count, task);
      __pipeline_wait_prior(0);
      __syncthreads();  // this tile is here, and nobody reads the one before
      if (plan.folds) {
        stage.fold(now.count, stage.tile(0));
        __syncthreads();
      }
      if (next.count > 0) stage.copy(next, buffer ^ 1);
      float* tile = stage.tile(plan.folds ? 0 : buffer);
      trial.add(work, plan, wanted, lane, now.count, tile,
                [&](int place) { return stage.part + stage.at(now.first + place); });
      if (next.count == 0 || next.task != task) trial.end_run(work, plan, wanted, lane, task, tile, to);
      if (next.count == 0) trial.end_part(work, plan, lane, tile, to);
      now = next;
      buffer ^= 1;
    }
  }
}

}  // namespace

template <int M>
Plan Plan::of(const Problem<float>& P, bool has_records) {
  using S = Shape<M>;
  constexpr int kStage = M * M / 3, kLoop = 5 * M * S::columns;  // instructions of a sequence, about
  constexpr int kReduced = 16 * kThreads;                        // floats in which sets are added
  Plan plan{};
  plan.folds = !has_records || S::lanes > 1;
  const int copied = !plan.folds ? 0 : has_records ? RecordOf<M>::floats : S::stored_floats;
  const int order = kPart / 2 + kMostTasks * (kWarps + 2) + 4;  // floats of the order and what is beside it
  const int all = kSharedBytes / 4;
  double least = 0;
  for (int slabs = 1, R = static_cast<int>(P.R); slabs <= R; ++slabs) {
    const int slab = (R + slabs - 1) / slabs, most = kThreads / (slab * S::lanes);
    if (most == 0) continue;
    const int left = all - S::parameters(slab) - order;
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
  plan.tiles = S::parameters(plan.slab);
  plan.buffer = std::max((plan.tile + 1) * S::floats, kReduced);
  plan.copied = plan.tiles + plan.buffer * (plan.folds ? 1 : 2);
  plan.order = plan.copied + (plan.tile + 1) * copied;
  plan.bytes = 4 * (plan.order + order);
  return plan;
}

namespace {

template <int M>
int launch_width(const Work& work, std::int64_t first_chunk, std::int64_t chunks, void* stream) {
  const Plan plan = Plan::of<M>(work.P, work.records != nullptr);
  return launch(trials_kernel<M>, dim3(static_cast<unsigned>(chunks * plan.slabs)), dim3(kThreads),
                static_cast<std::size_t>(plan.bytes), stream, work, plan, first_chunk);
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
  return P.layers == 0 && P.H == 1 && P.h == nullptr && out.dx == nullptr && out.dq == nullptr && P.R >= 1 &&
         P.K <= kMostTasks && width_for(P.m) != 0;
}

}  // namespace cuda
}  // namespace fastlin
