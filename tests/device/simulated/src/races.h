// Finds accesses to the same bytes that nothing orders.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "clock.h"

namespace simulated {

struct Range {
  char* begin;
  char* end;
};

struct Accesses {
  std::vector<Range> reads, writes;
};

// Who touches memory: a task of a stream, and what is ordered before it.
struct Accessor {
  size_t stream;
  uint64_t task;
  const Clock& clock;
  std::string label;  // "op on stream"
};

// Keeps for every byte who wrote it last, and who has read it on each stream since. Not thread-safe: the runtime's lock
// is held. What it reports depends on the order in which the host enqueued, and not on how fast the streams were.
class Races {
 public:
  // Looks at the accesses of a task, and remembers them. Returns what was found first, or "".
  std::string touch(const Accessor& who, const Accesses& accesses);

  // Looks at a read of the host, which needs no memory of it: what is enqueued later comes after it.
  std::string host_reads(const Clock& host, const Range& range, const std::string& label);

  const std::vector<std::string>& found() const {
    return found_;
  }

  void clear() {
    found_.clear();
  }

 private:
  struct Access {
    size_t stream;
    uint64_t task;
    std::string label;
  };
  struct Cell {
    char* end;
    bool is_written = false;
    Access writer;
    std::vector<Access> readers;
  };
  using Cells = std::map<char*, Cell>;

  void split(char* at);
  void read(const Accessor& who, const Range& range, std::string& first);
  void write(const Accessor& who, const Range& range, std::string& first);
  void report(const char* kind, const std::string& who, const Access& before, std::string& first);

  Cells cells_;  // by their first byte; they do not overlap
  std::vector<std::string> found_;
};

}  // namespace simulated
