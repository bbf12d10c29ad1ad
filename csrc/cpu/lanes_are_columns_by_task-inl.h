// Sums over the sequences of each task, for sequences in memory order (lanes_are_columns-inl.h). With few
// tasks each block keeps sums of all tasks, which are added in block order. With many tasks a pass stores the
// record of each sequence, 2 MB in all so that they stay in the cache (96 bytes a sequence at m = 11, where
// its tokens are 2200 bytes at n = 50). Each thread then adds the records of its part of the tasks, in the
// order of the sequences. Both ways give the same bits for any number of threads.

template <class T>
class ColumnsByTask {
  static constexpr std::int64_t N = Vec<T>::size;
  static constexpr std::int64_t kMostQuads = 1 + 3 * ((kWidestColumns + 3) / 4);
  static constexpr std::int64_t kWorthSharing = 1024;  // sequences; fewer are added on one thread
  static constexpr std::int64_t kTasks = 64;           // tasks that a thread finishes at a time
  static constexpr int kRows = Vec<T>::quads;

 public:
  ColumnsByTask(const Plan<T>& plan, const Results<T>& out, int threads, Stop& stop)
      : plan(plan),
        P(plan.problem),
        out(out),
        at(plan.record),
        quads(plan.quads_of_sums),
        threads(threads),
        stop(stop) {
    const std::int64_t Q = QuadGroups<T>::quads(P.m);
    std::int64_t next = 0;
    for (const std::int64_t vector : {at.e, at.q, at.a}) {
      if (vector < 0) continue;
      for (std::int64_t quad = Q - 1; quad >= 0; --quad, ++next) {
        source_quad[next] = 1 + next / Q * Q + quad;
        record_column[next] = vector + QuadGroups<T>::column(quad, P.m);
      }
    }
  }

  // Writes all results except dW, whose sums go to `matrices` [blocks, m, m]. Returns false if the call must
  // stop.
  bool run(double* matrices) {
    members = workers<LanesAreColumns<T>>(team_of(plan.blocks, threads), workspace, plan, out);
    return plan.sums_by_block ? in_blocks(matrices) : by_sequence(matrices);
  }

 private:
  using Members = std::vector<std::unique_ptr<LanesAreColumns<T>>>;

  // Runs sequences begin ... end - 1; adds their dW to `block_dW` and their sums to `by_task`.
  template <class S>
  void run_sequences(std::int64_t begin, std::int64_t end, int thread, double* block_dW, S&& by_task) const {
    if (stop.requested(thread)) return;
    members[static_cast<std::size_t>(thread)]->run(begin, end, block_dW, stop, thread, by_task);
  }

  std::int64_t task(std::int64_t sequence) const { return P.task == nullptr ? 0 : P.task[sequence]; }

  // sum [count, 4] += quads that are `step` numbers apart, in the type of the sum. Uses the compiler's vector
  // types: it does not vectorise the plain loop.
  template <int kCount, class S>
  FASTLIN_INLINE static void add_quads(const T* from, std::int64_t step, S* sum) {
    using Quad __attribute__((vector_size(4 * sizeof(T)))) = T;
    using Sums __attribute__((vector_size(4 * sizeof(S)))) = S;
    FASTLIN_UNROLL
    for (int i = 0; i < kCount; ++i) {
      Quad quad;
      Sums total;
      std::memcpy(&quad, from + i * step, sizeof(quad));
      std::memcpy(&total, sum + 4 * i, sizeof(total));
      total += __builtin_convertvector(quad, Sums);
      std::memcpy(sum + 4 * i, &total, sizeof(total));
    }
  }

  // Sums [K, quads, 4] of a block's sequences by task, in double. With very few tasks each row of a group has
  // its own sums of a chunk, in T: each adds at most 64 numbers with AVX-512, and a sequence takes 3 ns,
  // against 5 ns in double. Rows that share sums would wait for each other's additions.
  class InBlock {
   public:
    InBlock(const ColumnsByTask& all, double* sums)
        : all(all), quads(all.quads), copies(all.P.K * kRows <= kMost ? kRows : 0), sums(sums) {
      std::fill_n(row_sums, copies * all.P.K * quads * 4, T(0));
    }

    // Dispatches to the number of vectors of a record, of kQ quads each.
    template <int kQ, int kVectors = 3>
    FASTLIN_INLINE void group(std::int64_t first, std::int64_t rows, const T* group_sums) {
      if constexpr (kVectors > 0) {
        if (quads < 1 + kVectors * kQ) return group<kQ, kVectors - 1>(first, rows, group_sums);
      }
      constexpr int kQuads = 1 + kVectors * kQ;
      // Copies: the compiler must assume that a store of a quad changes the members.
      const std::int64_t* task_of_sequence = all.P.task;
      const std::int64_t tasks = all.P.K;
      const auto add = [=](std::int64_t tasks_per_row, auto* to) {
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t task = task_of_sequence == nullptr ? 0 : task_of_sequence[first + row];
          add_quads<kQuads>(group_sums + 4 * row, N, to + (row * tasks_per_row + task) * kQuads * 4);
        }
      };
      if (copies > 0) {
        add(tasks, row_sums);
      } else {
        add(0, sums);
      }
    }

    void end_chunk() {
      const std::int64_t size = all.P.K * quads * 4;
      for (std::int64_t copy = 0; copy < copies; ++copy) {
        for (std::int64_t i = 0; i < size; i += 4) add_quads<1>(row_sums + copy * size + i, 4, sums + i);
      }
      std::fill_n(row_sums, copies * size, T(0));
    }

   private:
    static constexpr std::int64_t kMost = 32;  // tasks times rows: 3.6 kB at m = 11

    const ColumnsByTask& all;
    const std::int64_t quads, copies;
    double* sums;
    T row_sums[kMost * kMostQuads * 4];  // [copies, K, quads, 4]
  };

  // Stores the records [sequences, padded_width] of the sequences from `begin` on.
  class BySequence {
   public:
    BySequence(const ColumnsByTask& all, std::int64_t begin, T* records)
        : all(all), begin(begin), records(records) {}

    template <int kQ>
    void group(std::int64_t first, std::int64_t rows, const T* group_sums) {
      const std::int64_t width = all.plan.padded_width;
      T* to = records + (first - begin) * width;
      for (std::int64_t row = 0; row < rows; ++row, to += width) all.store_record(group_sums + 4 * row, to);
    }

    void end_chunk() {}

   private:
    const ColumnsByTask& all;
    const std::int64_t begin;
    T* records;
  };

  bool in_blocks(double* matrices) {
    const std::int64_t size = P.K * quads * 4;
    const Memory memory = allocate(static_cast<std::size_t>(plan.blocks * size + 1) * sizeof(double));
    double* all = reinterpret_cast<double*>(memory.get());  // [blocks, K, quads, 4]
    for_each_block(plan.blocks, threads, [&](std::int64_t index, int thread) {
      const std::int64_t begin = index * plan.block_size, end = std::min(P.B, begin + plan.block_size);
      double *block_sums = all + index * size, *block_dW = matrices + index * plan.matrices;
      std::fill_n(block_sums, size, 0.0);
      std::fill_n(block_dW, plan.matrices, 0.0);
      run_sequences(begin, end, thread, block_dW, InBlock(*this, block_sums));
    });
    if (stop.requested(0)) return false;
    finish([&](std::int64_t k, double* record) {
      double sum[4 * kMostQuads] = {};
      for (std::int64_t index = 0; index < plan.blocks; ++index) {
        const double* from = all + (index * P.K + k) * quads * 4;
        for (std::int64_t i = 0; i < 4 * quads; ++i) sum[i] += from[i];
      }
      for_each_quad([&](std::int64_t quad, std::int64_t to) { std::copy_n(sum + 4 * quad, 4, record + to); });
      if (at.squares >= 0) record[at.squares] = sum[0];
      return record;
    });
    return true;
  }

  // Runs in passes; in each pass every block runs `sequences_at_once` sequences.
  bool by_sequence(double* matrices) {
    const std::int64_t step = plan.sequences_at_once, pass = plan.blocks * step, width = plan.padded_width;
    const Memory memory = allocate(static_cast<std::size_t>(pass * width) * sizeof(T) + 1);
    T* stored = reinterpret_cast<T*>(memory.get());  // [sequences of a pass, width] records
    const std::vector<std::int64_t> indices = record_indices();
    const auto record_index = [&](std::int64_t k) {
      return indices.empty() ? k : indices[static_cast<std::size_t>(k)];
    };
    std::vector<double> records(static_cast<std::size_t>(std::min(P.K, P.B) * width), 0.0);
    std::fill_n(matrices, plan.blocks * plan.matrices, 0.0);
    const std::int64_t parts = team_of(P.K, P.B < kWorthSharing ? 1 : threads);
    for (std::int64_t begin = 0; begin < P.B; begin += pass) {
      const std::int64_t end = std::min(P.B, begin + pass);
      for_each_block((end - begin + step - 1) / step, threads, [&](std::int64_t index, int thread) {
        const std::int64_t from = begin + index * step, until = std::min(end, from + step);
        run_sequences(from, until, thread, matrices + index * plan.matrices,
                      BySequence(*this, begin, stored));
      });
      if (stop.requested(0)) return false;
      // Each part adds the records of some of the tasks.
      for_each_block(parts, threads, [&](std::int64_t part, int) {
        const std::int64_t first = P.K * part / parts, last = P.K * (part + 1) / parts;
        for_each_sequence_of(first, last, begin, end, [&](std::int64_t i) {
          const T* from = stored + (i - begin) * width;
          double* record = records.data() + record_index(task(i)) * width;
          for (std::int64_t j = 0; j < width; j += 8) add_quads<2>(from + j, 4, record + j);
        });
      });
    }
    finish([&](std::int64_t k, double*) { return records.data() + record_index(k) * width; });
    return true;
  }

  void store_record(const T* sums, T* to) const {
    for (std::int64_t j = at.width; j < plan.padded_width; ++j) to[j] = T(0);
    for_each_quad([&](std::int64_t quad, std::int64_t column) {
      std::memcpy(to + column, sums + quad * N, 4 * sizeof(T));
    });
    if (at.squares >= 0) to[at.squares] = sums[0];
  }

  // Index of each task's record. Empty if task k has record k; otherwise only tasks with sequences have one.
  std::vector<std::int64_t> record_indices() const {
    std::vector<std::int64_t> indices(static_cast<std::size_t>(P.K > P.B ? P.K : 0));
    for (std::size_t k = 0, next = 0; k < indices.size(); ++k) {
      indices[k] = static_cast<std::int64_t>(next);
      if (plan.by_task.count(static_cast<std::int64_t>(k)) > 0) ++next;
    }
    return indices;
  }

  // Calls f(i) for the sequences begin ... end - 1 whose tasks are in first ... last - 1, in order. Finds
  // them 512 at a time without a branch that depends on a task.
  template <class F>
  void for_each_sequence_of(std::int64_t first, std::int64_t last, std::int64_t begin, std::int64_t end,
                            F f) const {
    constexpr std::int64_t kBatch = 512;
    std::int64_t matches[kBatch];
    const auto tasks = static_cast<std::uint64_t>(last - first);
    for (std::int64_t from = begin; from < end; from += kBatch) {
      std::int64_t count = 0;
      for (std::int64_t i = from; i < std::min(from + kBatch, end); ++i) {
        matches[count] = i;
        count += static_cast<std::uint64_t>(task(i) - first) < tasks ? 1 : 0;
      }
      for (std::int64_t i = 0; i < count; ++i) f(matches[i]);
    }
  }

  // Calls f(quad of the sums, its column in a record). The last quad of each vector comes first: it ends at
  // column m, and has zeros in columns that it shares with the quad before, which then overwrites them.
  template <class F>
  void for_each_quad(F f) const {
    for (std::int64_t i = 0; i < quads - 1; ++i) f(source_quad[i], record_column[i]);
  }

  // Calls f(k) for each task, on the threads.
  template <class F>
  void for_each_task(F f) const {
    for_each_block((P.K + kTasks - 1) / kTasks, P.K < 2 * kTasks ? 1 : threads, [&](std::int64_t part, int) {
      for (std::int64_t k = part * kTasks; k < std::min(P.K, (part + 1) * kTasks); ++k) f(k);
    });
  }

  // Writes the results of the tasks that have sequences; record_of(k, scratch) returns a task's record.
  template <class F>
  void finish(F record_of) const {
    for_each_task([&](std::int64_t k) {
      if (plan.by_task.count(k) == 0) return;
      double scratch[1 + 3 * kWidestColumns];
      finish_task(plan, out, k, record_of(k, scratch));
    });
  }

  const Plan<T>& plan;
  const Problem<T>& P;
  const Results<T>& out;
  const Record& at;
  const std::int64_t quads;
  const int threads;
  Stop& stop;
  Memory workspace;
  Members members;
  std::int64_t source_quad[kMostQuads], record_column[kMostQuads];
};
