// Sums over the sequences of each task, where they are taken as they lie in memory (columns-inl.h). Few tasks
// have sums in each block, which are joined in block order. Where tasks are many, the sums of each sequence,
// 112 bytes at m = 11 for 2200 of tokens at n = 50, are kept for as many blocks as 16 MB hold, and then added
// up task by task in the order of the sequences. Both are the same for any number of threads.

template <class T>
class ColumnsByTask {
  static constexpr std::int64_t N = Vec<T>::size;
  static constexpr std::int64_t kAhead = 8;  // sequences between one that is asked for and one that is added

 public:
  ColumnsByTask(const Plan<T>& plan, const Results<T>& out, int threads, Stop& stop)
      : plan(plan), P(plan.problem), out(out), quads(plan.quads_of_sums), threads(threads), stop(stop) {}

  // All results but what is made of dW's sums `matrices` [blocks, m, m]. Returns false when the call is to
  // stop.
  bool run(double* matrices) {
    Memory workspace;
    members = workers<Columns<T>>(team_of(plan.blocks, threads), workspace, plan, out);
    return plan.sums_by_block ? in_blocks(matrices) : by_sequence(matrices);
  }

 private:
  using Members = std::vector<std::unique_ptr<Columns<T>>>;

  // A block of sequences, whose groups' sums f gets.
  template <class F>
  bool block(std::int64_t index, int thread, double* matrices, F f) const {
    const std::int64_t begin = index * plan.block_size, end = std::min(P.B, begin + plan.block_size);
    double* block_dW = matrices + index * plan.matrices;
    std::fill_n(block_dW, plan.matrices, 0.0);
    return members[static_cast<std::size_t>(thread)]->run(begin, end, block_dW, stop, thread, f);
  }

  std::int64_t task(std::int64_t sequence) const { return P.task == nullptr ? 0 : P.task[sequence]; }

  // sum [quads, 4] += quads that lie `step` numbers apart.
  void add(const T* from, std::int64_t step, double* sum) const {
    for (std::int64_t quad = 0; quad < quads; ++quad, from += step, sum += 4) {
      FASTLIN_UNROLL
      for (int i = 0; i < 4; ++i) sum[i] += static_cast<double>(from[i]);
    }
  }

  bool in_blocks(double* matrices) {
    const std::int64_t size = P.K * quads * 4;
    const Memory memory = allocate(static_cast<std::size_t>(plan.blocks * size + 1) * sizeof(double));
    double* all = reinterpret_cast<double*>(memory.get());  // [blocks, K, quads, 4]
    for_each_block(plan.blocks, threads, [&](std::int64_t index, int thread) {
      double* here = all + index * size;
      std::fill_n(here, size, 0.0);
      block(index, thread, matrices, [&](std::int64_t first, std::int64_t rows, const T* sums) {
        for (std::int64_t row = 0; row < rows; ++row) {
          add(sums + 4 * row, N, here + task(first + row) * quads * 4);
        }
      });
    });
    if (stop.now(0)) return false;
    finish([&](std::int64_t k, double* sum) {
      for (std::int64_t index = 0; index < plan.blocks; ++index) {
        const double* from = all + index * size + k * quads * 4;
        for (std::int64_t i = 0; i < 4 * quads; ++i) sum[i] += from[i];
      }
    });
    return true;
  }

  // What is kept of a sequence takes whole cache lines: it is read in the order of tasks.
  bool by_sequence(double* matrices) {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    const std::int64_t at_once = plan.blocks_at_once, size = quads * 4,
                       row = (size + kLine - 1) / kLine * kLine;
    const Memory memory = allocate(static_cast<std::size_t>(at_once * plan.block_size * row) * sizeof(T));
    T* kept = reinterpret_cast<T*>(memory.get());  // [sequences, row]
    const auto add_task = [&](const TaskOrder& order, std::int64_t k, double* sum) {
      for (std::int64_t i = order.start[k]; i < order.start[k + 1]; ++i) {
        const T* ahead = kept + order.sequence(std::min(i + kAhead, order.start[P.K] - 1)) * row;
        for (std::int64_t line = 0; line < row; line += kLine) __builtin_prefetch(ahead + line);
        add(kept + order.sequence(i) * row, 4, sum);
      }
    };
    // Sums so far [K, quads, 4], when they are not made in one go.
    std::vector<double> so_far(static_cast<std::size_t>(at_once < plan.blocks ? P.K * size : 0), 0.0);
    for (std::int64_t first_block = 0; first_block < plan.blocks; first_block += at_once) {
      const std::int64_t begin = first_block * plan.block_size;
      const std::int64_t end = std::min(P.B, begin + at_once * plan.block_size);
      for_each_block(std::min(at_once, plan.blocks - first_block), threads, [&](std::int64_t i, int thread) {
        block(first_block + i, thread, matrices, [&](std::int64_t first, std::int64_t rows, const T* sums) {
          T* to = kept + (first - begin) * row;
          for (std::int64_t k = 0; k < rows; ++k, to += row) {
            for (std::int64_t quad = 0; quad < quads; ++quad) {
              std::memcpy(to + 4 * quad, sums + quad * N + 4 * k, 4 * sizeof(T));
            }
          }
        });
      });
      if (stop.now(0)) return false;
      if (so_far.empty()) {
        finish([&](std::int64_t k, double* sum) { add_task(plan.by_task, k, sum); });
        return true;
      }
      const TaskOrder order(P.task + begin, end - begin, P.K, true);
      for_each_task([&](std::int64_t k) { add_task(order, k, so_far.data() + k * size); });
    }
    finish([&](std::int64_t k, double* sum) { std::copy_n(so_far.data() + k * size, size, sum); });
    return true;
  }

  // Parts of the tasks on the threads: f(k) for each.
  template <class F>
  void for_each_task(F f) const {
    constexpr std::int64_t kTasks = 64;
    for_each_block((P.K + kTasks - 1) / kTasks, P.K < 2 * kTasks ? 1 : threads, [&](std::int64_t part, int) {
      for (std::int64_t k = part * kTasks; k < std::min(P.K, (part + 1) * kTasks); ++k) f(k);
    });
  }

  // The results of the tasks that have sequences; add_task(k, sum) adds those of one to zeros.
  template <class F>
  void finish(F add_task) const {
    const Record& at = plan.record;
    for_each_task([&](std::int64_t k) {
      if (plan.by_task.count(k) == 0) return;
      constexpr std::int64_t kMost = 1 + 3 * ((kWidestColumns + 3) / 4);
      double sum[4 * kMost] = {}, record[1 + 3 * kWidestColumns];
      add_task(k, sum);
      if (at.squares >= 0) record[at.squares] = sum[0];
      const double* from = sum + 4;
      for (const std::int64_t vector : {at.e, at.q, at.a}) {
        if (vector >= 0) from = take_vector(from, record + vector);
      }
      finish_task(plan, out, k, record);
    });
  }

  // to [m] of quads [Q, 4], of which the last one ends at column m; what it shares may be zero in it.
  const double* take_vector(const double* from, double* to) const {
    for (std::int64_t quad = 0; quad < QuadGroups<T>::quads(P.m); ++quad, from += 4) {
      const std::int64_t column = QuadGroups<T>::column(quad, P.m);
      for (std::int64_t i = 4 * quad - column; i < 4; ++i) to[column + i] = from[i];
    }
    return from;
  }

  const Plan<T>& plan;
  const Problem<T>& P;
  const Results<T>& out;
  const std::int64_t quads;
  const int threads;
  Stop& stop;
  Members members;
};
