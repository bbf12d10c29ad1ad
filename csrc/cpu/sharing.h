// Decides whether a calling thread shares the blocks of its calls with other threads.
//
// A shared call waits at its end for a thread that has lost its core to another process, and libgomp's
// threads spin meanwhile: with one of two cores busy, calls on two threads took 1.2 to 3.6 times as long as
// on one, and 8 ms each where both threads had met on one core. So each shared call is compared with the core
// time of its blocks, which is what it would have taken alone. When shared calls have lost more than they
// gained, the calls that follow run alone, for a multiple of the loss that grows while sharing keeps losing:
// several threads then cost a few percent more than one. docs/performance.md has figures.
//
// A pool of sleeping threads, from which the caller takes back what nobody has begun, takes 0.7 to 1.2 there.
// But torch's threads spin for milliseconds after each of torch's operations, on the cores that the pool
// needs: calls of 50 trials of 8192 sequences that alternate with operations on 10^6 numbers took 1.15 to 1.6
// times the sum of both, here 1.0 to 1.06.
#pragma once

#include <algorithm>
#include <chrono>

namespace fastlin {

class Sharing {
 public:
  using Time = std::chrono::nanoseconds;

  bool pays() const { return rest_ <= Time(0); }

  // A call ran alone.
  void ran_alone(Time took) { rest_ -= took; }

  // A shared call took this long; its blocks took `worked` on all threads together.
  void shared(Time took, Time worked) {
    lost_ = std::max(lost_ + took - worked, -kCredit);
    if (lost_ == -kCredit) factor_ = kLeastFactor;
    if (lost_ <= kGrace) return;
    rest_ = std::min(factor_ * lost_, kMostRest);
    lost_ = Time(0);
    factor_ = std::min(2 * factor_, kMostFactor);
  }

 private:
  // Gains count up to 10 ms: a core that was busy for a moment does not end sharing. A loss of 0.1 ms is
  // allowed: the first call after a pause wakes the threads, which takes 25 us.
  static constexpr Time kCredit = std::chrono::milliseconds(10), kGrace = std::chrono::microseconds(100);
  // Rest for so many times the loss: doubled after each loss, until sharing has gained as much as counts. The
  // limit of 0.5 s is how long a machine that is free again may go unnoticed; a loss with one core busy is 4
  // to 12 ms.
  static constexpr int kLeastFactor = 5, kMostFactor = 160;
  static constexpr Time kMostRest = std::chrono::milliseconds(500);

  Time lost_{0};  // beyond what was gained
  Time rest_{0};  // of calls still to run alone
  int factor_ = kLeastFactor;
};

}  // namespace fastlin
