// Vector clocks: what is ordered before what, whatever the timing was.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulated {

// Entry `stream` is the number of the last task of that stream which happens before the owner of the clock.
class Clock {
 public:
  uint64_t at(size_t stream) const {
    return stream < seen_.size() ? seen_[stream] : 0;
  }

  void advance(size_t stream, uint64_t task) {
    if (seen_.size() <= stream) seen_.resize(stream + 1, 0);
    seen_[stream] = std::max(seen_[stream], task);
  }

  void merge(const Clock& other) {
    for (size_t stream = 0; stream < other.seen_.size(); ++stream) advance(stream, other.seen_[stream]);
  }

 private:
  std::vector<uint64_t> seen_;
};

}  // namespace simulated
