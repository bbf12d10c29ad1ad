// Sums over the sequences of each task, where they are taken as they lie in memory (columns-inl.h). Few tasks
// have sums in each block, which are joined in block order. Where tasks are many, the record of each
// sequence, 96 bytes at m = 11 for 2200 of tokens at n = 50, is kept while the 2 MB of a pass are in the
// cache; then each thread adds those of a part of the tasks to theirs, in the order of the sequences. Both
// give the same bits for any number of threads.

template <class T>
class ColumnsByTask {
  static constexpr std::int64_t N = Vec<T>::size;
  static constexpr std::int64_t kMostQuads = 1 + 3 * ((kWidestColumns + 3) / 4);
  static constexpr std::int64_t kWorthSharing = 1024;  // sequences whose records are added
  static constexpr std::int64_t kTasks = 64;           // that a thread finishes at a time
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
        from_quad[next] = 1 + next / Q * Q + quad;
        to_place[next] = vector + QuadGroups<T>::column(quad, P.m);
      }
    }
  }

  // All results but what is made of dW's sums `matrices` [blocks, m, m]. Returns false when the call is to
  // stop.
  bool run(double* matrices) {
    members = workers<Columns<T>>(team_of(plan.blocks, threads), workspace, plan, out);
    return plan.sums_by_block ? in_blocks(matrices) : by_sequence(matrices);
  }

 private:
  using Members = std::vector<std::unique_ptr<Columns<T>>>;

  // Sequences begin ... end - 1, whose dW is added to `block_dW` and whose sums to `by_task`.
  template <class S>
  void sequences(std::int64_t begin, std::int64_t end, int thread, double* block_dW, S&& by_task) const {
    if (stop.now(thread)) return;
    members[static_cast<std::size_t>(thread)]->run(begin, end, block_dW, stop, thread, by_task);
  }

  std::int64_t task(std::int64_t sequence) const { return P.task == nullptr ? 0 : P.task[sequence]; }

  // sum [count, 4] += quads that lie `step` numbers apart, in the sum's type. Vectors of the compiler's: it
  // makes single numbers of the plain loop.
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

  // Sums [K, quads, 4] of a block's sequences by their tasks, in double. If tasks are very few, each row has
  // sums of its own, in T, of a chunk: 64 numbers at most with AVX-512, 3 ns a sequence for 5 in double. What
  // is added to those of the row before would wait for them.
  class InBlock {
   public:
    InBlock(const ColumnsByTask& all, double* sums)
        : all(all), quads(all.quads), copies(all.P.K * kRows <= kMost ? kRows : 0), sums(sums) {
      std::fill_n(of_rows, copies * all.P.K * quads * 4, T(0));
    }

    // As many vectors as a record has, of kQ quads each.
    template <int kQ, int kVectors = 3>
    FASTLIN_INLINE void group(std::int64_t first, std::int64_t rows, const T* of_group) {
      if constexpr (kVectors > 0) {
        if (quads < 1 + kVectors * kQ) return group<kQ, kVectors - 1>(first, rows, of_group);
      }
      constexpr int kQuads = 1 + kVectors * kQ;
      // Stores of quads may be to anything, for all that the compiler knows.
      const std::int64_t* of_sequence = all.P.task;
      const std::int64_t tasks = all.P.K;
      const auto add = [=](std::int64_t tasks_of_row, auto* to) {
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t task = of_sequence == nullptr ? 0 : of_sequence[first + row];
          add_quads<kQuads>(of_group + 4 * row, N, to + (row * tasks_of_row + task) * kQuads * 4);
        }
      };
      if (copies > 0) {
        add(tasks, of_rows);
      } else {
        add(0, sums);
      }
    }

    void end_chunk() {
      const std::int64_t size = all.P.K * quads * 4;
      for (std::int64_t copy = 0; copy < copies; ++copy) {
        for (std::int64_t i = 0; i < size; i += 4) add_quads<1>(of_rows + copy * size + i, 4, sums + i);
      }
      std::fill_n(of_rows, copies * size, T(0));
    }

   private:
    static constexpr std::int64_t kMost = 32;  // sums of tasks and rows: 3.6 kB at m = 11

    const ColumnsByTask& all;
    const std::int64_t quads, copies;
    double* sums;
    T of_rows[kMost * kMostQuads * 4];  // [copies, K, quads, 4]
  };

  // Records [sequences, kept_of_sequence] of those from `begin` on.
  class BySequence {
   public:
    BySequence(const ColumnsByTask& all, std::int64_t begin, T* kept) : all(all), begin(begin), kept(kept) {}

    template <int kQ>
    void group(std::int64_t first, std::int64_t rows, const T* of_group) {
      const std::int64_t width = all.plan.kept_of_sequence;
      T* to = kept + (first - begin) * width;
      for (std::int64_t row = 0; row < rows; ++row, to += width) all.keep_row(of_group + 4 * row, to);
    }

    void end_chunk() {}

   private:
    const ColumnsByTask& all;
    const std::int64_t begin;
    T* kept;
  };

  bool in_blocks(double* matrices) {
    const std::int64_t size = P.K * quads * 4;
    const Memory memory = allocate(static_cast<std::size_t>(plan.blocks * size + 1) * sizeof(double));
    double* all = reinterpret_cast<double*>(memory.get());  // [blocks, K, quads, 4]
    for_each_block(plan.blocks, threads, [&](std::int64_t index, int thread) {
      const std::int64_t begin = index * plan.block_size, end = std::min(P.B, begin + plan.block_size);
      double *here = all + index * size, *block_dW = matrices + index * plan.matrices;
      std::fill_n(here, size, 0.0);
      std::fill_n(block_dW, plan.matrices, 0.0);
      sequences(begin, end, thread, block_dW, InBlock(*this, here));
    });
    if (stop.now(0)) return false;
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

  // In passes, in each of which every block takes some sequences, wherever they lie.
  bool by_sequence(double* matrices) {
    const std::int64_t step = plan.sequences_at_once, pass = plan.blocks * step,
                       width = plan.kept_of_sequence;
    const Memory memory = allocate(static_cast<std::size_t>(pass * width) * sizeof(T) + 1);
    T* kept = reinterpret_cast<T*>(memory.get());  // [sequences of a pass, width], each a record
    const std::vector<std::int64_t> places = places_of_tasks();
    const auto place = [&](std::int64_t k) {
      return places.empty() ? k : places[static_cast<std::size_t>(k)];
    };
    std::vector<double> records(static_cast<std::size_t>(std::min(P.K, P.B) * width), 0.0);
    std::fill_n(matrices, plan.blocks * plan.matrices, 0.0);
    const std::int64_t parts = team_of(P.K, P.B < kWorthSharing ? 1 : threads);
    for (std::int64_t begin = 0; begin < P.B; begin += pass) {
      const std::int64_t end = std::min(P.B, begin + pass);
      for_each_block((end - begin + step - 1) / step, threads, [&](std::int64_t index, int thread) {
        const std::int64_t from = begin + index * step, until = std::min(end, from + step);
        sequences(from, until, thread, matrices + index * plan.matrices, BySequence(*this, begin, kept));
      });
      if (stop.now(0)) return false;
      // Each part has some of the tasks, and finds their sequences.
      for_each_block(parts, threads, [&](std::int64_t part, int) {
        const std::int64_t first = P.K * part / parts, last = P.K * (part + 1) / parts;
        for_each_of(first, last, begin, end, [&](std::int64_t i) {
          const T* from = kept + (i - begin) * width;
          double* record = records.data() + place(task(i)) * width;
          for (std::int64_t j = 0; j < width; j += 8) add_quads<2>(from + j, 4, record + j);
        });
      });
    }
    finish([&](std::int64_t k, double*) { return records.data() + place(k) * width; });
    return true;
  }

  void keep_row(const T* sums, T* to) const {
    for (std::int64_t j = at.width; j < plan.kept_of_sequence; ++j) to[j] = T(0);
    for_each_quad([&](std::int64_t quad, std::int64_t place) {
      std::memcpy(to + place, sums + quad * N, 4 * sizeof(T));
    });
    if (at.squares >= 0) to[at.squares] = sums[0];
  }

  // Places of the tasks' records; none when each has one by its number, else one for each that has sequences.
  std::vector<std::int64_t> places_of_tasks() const {
    std::vector<std::int64_t> places(static_cast<std::size_t>(P.K > P.B ? P.K : 0));
    for (std::size_t k = 0, next = 0; k < places.size(); ++k) {
      places[k] = static_cast<std::int64_t>(next);
      if (plan.by_task.count(static_cast<std::int64_t>(k)) > 0) ++next;
    }
    return places;
  }

  // f(i) for the sequences of tasks first ... last - 1 among begin ... end - 1, in their order: a few hundred
  // at a time are found without a branch that depends on a task, and then used.
  template <class F>
  void for_each_of(std::int64_t first, std::int64_t last, std::int64_t begin, std::int64_t end, F f) const {
    constexpr std::int64_t kFound = 512;
    std::int64_t found[kFound];
    const auto tasks = static_cast<std::uint64_t>(last - first);
    for (std::int64_t from = begin; from < end; from += kFound) {
      std::int64_t count = 0;
      for (std::int64_t i = from; i < std::min(from + kFound, end); ++i) {
        found[count] = i;
        count += static_cast<std::uint64_t>(task(i) - first) < tasks ? 1 : 0;
      }
      for (std::int64_t i = 0; i < count; ++i) f(found[i]);
    }
  }

  // f(quad of the sums, its place in a record): of each vector the last one first, which ends at column m and
  // may have zeros where it shares columns with the one before.
  template <class F>
  void for_each_quad(F f) const {
    for (std::int64_t i = 0; i < quads - 1; ++i) f(from_quad[i], to_place[i]);
  }

  // Parts of the tasks on the threads: f(k) for each.
  template <class F>
  void for_each_task(F f) const {
    for_each_block((P.K + kTasks - 1) / kTasks, P.K < 2 * kTasks ? 1 : threads, [&](std::int64_t part, int) {
      for (std::int64_t k = part * kTasks; k < std::min(P.K, (part + 1) * kTasks); ++k) f(k);
    });
  }

  // The results of the tasks that have sequences, of which make(k, room) returns the records.
  template <class F>
  void finish(F make) const {
    for_each_task([&](std::int64_t k) {
      if (plan.by_task.count(k) == 0) return;
      double room[1 + 3 * kWidestColumns];
      finish_task(plan, out, k, make(k, room));
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
  std::int64_t from_quad[kMostQuads], to_place[kMostQuads];
};
