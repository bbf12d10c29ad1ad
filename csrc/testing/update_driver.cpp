// The optimiser update of the CPU over edge sizes. Returns 0 if any number of threads gives the same bits and
// every number is finite.

#include "cpu/update.h"
#include "testing/update_cases.h"

namespace fastlin {
namespace {

template <class T>
int holds(const UpdateRule& rule, std::int64_t R) {
  const auto on = [](int threads) { return [threads](const auto&... given) { update(given..., threads); }; };
  return agree(updated<T>(rule, R, on(1)), updated<T>(rule, R, on(4))) ? 1 : 0;
}

}  // namespace
}  // namespace fastlin

int main() {
  using namespace fastlin;
  return all_updates_hold({1, 3, 50}, 2, [](const UpdateRule& rule, std::int64_t R) {
    return holds<float>(rule, R) + holds<double>(rule, R);
  });
}
