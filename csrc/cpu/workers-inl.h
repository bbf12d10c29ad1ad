// Threads with workspace.

// How many threads there is a block for.
inline int team_of(std::int64_t blocks, int threads) {
  return static_cast<int>(std::clamp<std::int64_t>(blocks, 1, threads));
}

// A worker for each thread, laid out in one piece of memory. Its parts refer to each other: it stays where it
// is made.
template <class W, class... Given>
std::vector<std::unique_ptr<W>> workers(int threads, Memory& memory, const Given&... given) {
  Arena count;
  W measured(count, given...);
  const std::size_t each = count.used();
  memory = allocate(each + 1, static_cast<std::size_t>(threads));
  std::vector<std::unique_ptr<W>> team;
  for (int i = 0; i < threads; ++i) {
    Arena arena(memory.get() + each * static_cast<std::size_t>(i));
    team.push_back(std::make_unique<W>(arena, given...));
  }
  return team;
}
