// The kernels in the table of an instruction set: they allocate workspace, start threads and add the sums of
// blocks.

// sum [count] = partial sums [blocks, count], added in block order.
template <class T>
void add_blocks(const double* partial, std::int64_t blocks, std::int64_t stride, std::int64_t count,
                int threads, T* sum) {
  constexpr std::int64_t kPart = 1024;
  const std::int64_t parts = (count + kPart - 1) / kPart;
  for_each_block(parts, parts * blocks < 64 ? 1 : threads, [&](std::int64_t part, int) {
    double total[kPart] = {};
    const std::int64_t first = part * kPart, size = std::min(kPart, count - first);
    for (std::int64_t block = 0; block < blocks; ++block) {
      const double* from = partial + block * stride + first;
      for (std::int64_t i = 0; i < size; ++i) total[i] += from[i];
    }
    for (std::int64_t i = 0; i < size; ++i) sum[first + i] = static_cast<T>(total[i]);
  });
}

// sums [vectors, m]: dv [vectors, K, m], added over tasks.
template <class T>
void add_tasks(const T* dv_by_task, std::int64_t vectors, std::int64_t K, std::int64_t m, T* sums) {
  std::vector<double> sum(static_cast<std::size_t>(m));
  for (std::int64_t vector = 0; vector < vectors; ++vector, sums += m) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (std::int64_t k = 0; k < K; ++k, dv_by_task += m) {
      for (std::int64_t i = 0; i < m; ++i) sum[static_cast<std::size_t>(i)] += dv_by_task[i];
    }
    for (std::int64_t i = 0; i < m; ++i) sums[i] = static_cast<T>(sum[static_cast<std::size_t>(i)]);
  }
}

// Writes all results except dW, dA and dC, whose sums by block go to `matrices` [blocks, matrices].
template <class T>
bool attend(const Plan<T>& plan, const Results<T>& out, int threads, Stop& stop, double* matrices) {
  static_assert((Vec<T>::quads > 0) == (Vec<T>::size >= 4),
                "the plan assumes quads in vectors of four lanes or more");
  if constexpr (Vec<T>::quads > 0) {
    if (plan.in_columns) return ColumnsByTask<T>(plan, out, threads, stop).run(matrices);
  }
  Memory workspace;
  const auto members = workers<LanesAreSequences<T>>(team_of(plan.blocks, threads), workspace, plan, out);
  const std::int64_t record = plan.problem.R * plan.record.width;
  const Memory record_memory =
      allocate(static_cast<std::size_t>(plan.blocks * 2 * record + 1) * sizeof(double));
  double* records = reinterpret_cast<double*>(record_memory.get());  // [blocks, 2, R, width]
  std::vector<BoundaryTasks> shared_tasks(static_cast<std::size_t>(plan.blocks));
  for_each_block(plan.blocks, threads, [&](std::int64_t block, int thread) {
    members[static_cast<std::size_t>(thread)]->block(
        block, matrices + block * plan.matrices, records + block * 2 * record,
        shared_tasks[static_cast<std::size_t>(block)], stop, thread);
  });
  if (stop.requested(0)) return false;
  join_boundary_records(plan, out, shared_tasks, records);
  return true;
}

template <class T>
bool attention(const Problem<T>& problem, const Results<T>& results, int threads, Interrupt interrupt) {
  Problem<T> P = problem;
  Results<T> out = results;
  Memory dv_by_task;  // used when tasks share v
  if (P.shares_v && out.dv != nullptr) {
    dv_by_task = allocate(static_cast<std::size_t>(P.R * P.H * P.K * P.m) * sizeof(T));
    out.dv = reinterpret_cast<T*>(dv_by_task.get());
  }
  std::vector<std::int64_t> drawn_tasks;
  if (P.source != nullptr && P.K > 1) {
    drawn_tasks.resize(static_cast<std::size_t>(P.B));
    if (!sample_tasks<T>(*P.source, P.B, drawn_tasks.data(), threads, interrupt)) return false;
    P.task = drawn_tasks.data();
  }
  const Plan<T> plan(P, out, static_cast<int>(Vec<T>::size));
  Stop stop(interrupt);
  clear_results(plan, out);
  const Memory partial = allocate(static_cast<std::size_t>(plan.blocks * plan.matrices + 1) * sizeof(double));
  double* matrices = reinterpret_cast<double*>(partial.get());  // [blocks, matrices]
  if (!attend(plan, out, threads, stop, matrices)) return false;
  std::int64_t first = 0;
  const std::int64_t square = P.R * P.H * P.m * P.m;
  const auto add = [&](T* sum, std::int64_t count) {
    if (sum == nullptr) return;
    add_blocks(matrices + first, plan.blocks, plan.matrices, count, threads, sum);
    first += count;
  };
  add(out.dW, square);
  add(out.dA, square * P.layers);
  add(out.dC, square * P.layers);
  if (dv_by_task != nullptr) add_tasks(out.dv, P.R * P.H, P.K, P.m, results.dv);
  if (out.loss != nullptr) write_loss(plan, out);
  return true;
}

template <class T>
class GramWorker {
  using L = Tile<T>;
  static constexpr std::int64_t N = L::N;

 public:
  GramWorker(Arena& arena, std::int64_t n, std::int64_t m)
      : G(arena.take<T>(m * m * N)), scratch(arena.take<T>(Gram<T>::scratch(n, m))) {}

  // G [m, m] of sequences first ... first + lanes - 1.
  void tile(const T* z, std::int64_t batch, std::int64_t row, std::int64_t first, int lanes, std::int64_t n,
            std::int64_t m, T* out) {
    const T* rows[N];
    T* to[N];
    for (int l = 0; l < N; ++l) {
      const std::int64_t sequence = first + std::min(l, lanes - 1);
      rows[l] = z == nullptr ? nullptr : z + sequence * batch;  // without tokens there is no address
      to[l] = out + sequence * m * m;
    }
    Gram<T>::of_tokens(Tokens<T>{rows, nullptr, row, n, m}, G, scratch);
    L::store(G, m * m, to, 0, lanes);
  }

 private:
  T *G, *scratch;
};

template <class T>
bool gram(const T* z, std::int64_t batch, std::int64_t row, std::int64_t B, std::int64_t n, std::int64_t m,
          T* G, int threads, Interrupt interrupt) {
  constexpr std::int64_t N = Vec<T>::size;
  Stop stop(interrupt);
  Memory workspace;
  const auto members = workers<GramWorker<T>>(team_of(blocks_of(B), threads), workspace, n, m);
  for_each_block(blocks_of(B), threads, [&](std::int64_t block, int thread) {
    if (stop.requested(thread)) return;
    const std::int64_t end = std::min(B, (block + 1) * kBlock);
    for (std::int64_t first = block * kBlock; first < end; first += N) {
      members[static_cast<std::size_t>(thread)]->tile(z, batch, row, first,
                                                      static_cast<int>(std::min(N, end - first)), n, m, G);
    }
  });
  return !stop.requested(0);
}

// Twelve independent chains of multiply-adds: measures the peak rate of the machine.
template <class T>
double fma_chains(std::int64_t iterations) {
  using V = Vec<T>;
  constexpr int kChains = 12;
  V chain[kChains];
  FASTLIN_UNROLL
  for (int i = 0; i < kChains; ++i) chain[i] = V::set(T(i));
  const V factor = V::set(T(0.999)), term = V::set(T(1e-3));
  for (std::int64_t i = 0; i < iterations; ++i) {
    FASTLIN_UNROLL
    for (int j = 0; j < kChains; ++j) chain[j] = fma(chain[j], factor, term);
  }
  V sum = V::zero();
  FASTLIN_UNROLL
  for (int i = 0; i < kChains; ++i) sum = sum + chain[i];
  T lanes[V::size];
  sum.store(lanes);
  // Uses the sum, which is never negative, so that the compiler keeps the chains.
  return lanes[0] < T(0) ? 0.0 : 2.0 * kChains * V::size * static_cast<double>(iterations);
}

template <class T>
Kernels<T> kernels() {
  return {Vec<T>::size,   &attention<T>,    &gram<T>,        &sample<T>,   &sample_tasks<T>,
          &fma_chains<T>, &fill_uniform<T>, &fill_normal<T>, &fill_chi<T>, &box_muller_pairs<T>};
}
