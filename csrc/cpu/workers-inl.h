// Workers: one for each thread, with its workspace.

// The number of threads that have a block to run.
inline int team_of(std::int64_t blocks, int threads) {
  return static_cast<int>(std::clamp<std::int64_t>(blocks, 1, threads));
}

// Makes a worker for each thread, in one allocation. A worker cannot move: its parts point to each other.
template <class W, class... Arguments>
std::vector<std::unique_ptr<W>> workers(int threads, Memory& memory, const Arguments&... arguments) {
  Arena counter;
  W counted(counter, arguments...);
  const std::size_t each = counter.used();
  memory = allocate(each + 1, static_cast<std::size_t>(threads));
  std::vector<std::unique_ptr<W>> team;
  for (int i = 0; i < threads; ++i) {
    Arena arena(memory.get() + each * static_cast<std::size_t>(i));
    team.push_back(std::make_unique<W>(arena, arguments...));
  }
  return team;
}
