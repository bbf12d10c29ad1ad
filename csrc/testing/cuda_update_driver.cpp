// The optimiser update of csrc/cuda in emulation over edge sizes, with a schedule and without. Returns 0 if
// any order of threads and blocks gives the same bits and every number is finite.

#include <memory>

#include "cuda/platform.h"
#include "cuda/update.h"
#include "testing/update_cases.h"

namespace fastlin {
namespace {

// In an order, with workspace of exactly its size. Two steps are what the schedule has.
template <class T>
std::vector<UpdateArrays<T>> in_order(const UpdateRule& rule, std::int64_t R, unsigned order,
                                      bool scheduled) {
  emulated::device.order = order;
  std::vector<double> words{0, 0, 1, 0.25, 0, 1, 0.25, 0, 0.5, 1};
  return updated<T>(rule, R, [&](const auto&, const auto& trials, const auto& parameters) {
    std::int64_t width = 0;
    for (const auto& p : parameters) width += p.size;
    const std::size_t bytes = static_cast<std::size_t>(cuda::update_bytes(R, width));
    const std::unique_ptr<unsigned char[]> workspace(new unsigned char[bytes]);
    const cuda::Schedule schedule{scheduled ? words.data() : nullptr, 2, 3, true};
    cuda::update(rule, trials, parameters, schedule, workspace.get(), 0, nullptr);
  });
}

template <class T>
int holds(const UpdateRule& rule, std::int64_t R) {
  int passed = 0;
  for (const bool scheduled : {false, true}) {
    const auto expected = in_order<T>(rule, R, 0, scheduled);
    for (const unsigned order : {1u, 2u}) passed += agree(expected, in_order<T>(rule, R, order, scheduled));
  }
  return passed;
}

}  // namespace
}  // namespace fastlin

int main() {
  using namespace fastlin;
  return all_updates_hold({1, 3}, 8, [](const UpdateRule& rule, std::int64_t R) {
    return holds<float>(rule, R) + holds<double>(rule, R);
  });
}
