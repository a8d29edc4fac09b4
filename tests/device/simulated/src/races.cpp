#include "races.h"

namespace simulated {

// A program that is wrong everywhere must not fill the memory with reports.
constexpr size_t kMostReports = 200;

static bool is_before(const Clock& clock, size_t stream, uint64_t task) {
  return clock.at(stream) >= task;
}

std::string Races::touch(const Accessor& who, const Accesses& accesses) {
  std::string first;
  for (const Range& range : accesses.reads) read(who, range, first);
  for (const Range& range : accesses.writes) write(who, range, first);
  return first;
}

std::string Races::host_reads(const Clock& host, const Range& range, const std::string& label) {
  std::string first;
  split(range.begin);
  for (auto cell = cells_.lower_bound(range.begin); cell != cells_.end() && cell->first < range.end; ++cell) {
    const Cell& c = cell->second;
    if (c.is_written && !is_before(host, c.writer.stream, c.writer.task)) {
      report("RAW", label + " on host", c.writer, first);
      break;
    }
  }
  return first;
}

// Makes `at` the border of a cell if it is inside of one.
void Races::split(char* at) {
  auto cell = cells_.upper_bound(at);
  if (cell == cells_.begin()) return;
  --cell;
  if (cell->first == at || at >= cell->second.end) return;
  Cell rest = cell->second;
  cell->second.end = at;
  cells_.emplace(at, std::move(rest));
}

void Races::read(const Accessor& who, const Range& range, std::string& first) {
  split(range.begin);
  split(range.end);
  bool is_reported = false;  // once for an argument, not for each of its cells
  char* at = range.begin;
  for (auto cell = cells_.lower_bound(at); at < range.end; ++cell) {
    if (cell == cells_.end() || cell->first > at) {
      char* end = cell == cells_.end() ? range.end : std::min(cell->first, range.end);
      cell = cells_.emplace(at, Cell{end, false, {}, {}}).first;
    }
    Cell& c = cell->second;
    if (c.is_written && !is_reported && !is_before(who.clock, c.writer.stream, c.writer.task)) {
      report("RAW", who.label, c.writer, first);
      is_reported = true;
    }
    const Access access{who.stream, who.task, who.label};
    auto mine = std::find_if(c.readers.begin(), c.readers.end(), [&](const Access& a) { return a.stream == who.stream; });
    if (mine == c.readers.end()) {
      c.readers.push_back(access);
    } else {
      *mine = access;
    }
    at = c.end;
  }
}

void Races::write(const Accessor& who, const Range& range, std::string& first) {
  if (range.begin >= range.end) return;
  split(range.begin);
  split(range.end);
  bool is_reported = false;
  const auto begin = cells_.lower_bound(range.begin);
  auto cell = begin;
  for (; cell != cells_.end() && cell->first < range.end; ++cell) {
    const Cell& c = cell->second;
    for (const Access& reader : c.readers) {
      if (is_reported || is_before(who.clock, reader.stream, reader.task)) continue;
      report("WAR", who.label, reader, first);
      is_reported = true;
    }
    if (c.is_written && !is_reported && !is_before(who.clock, c.writer.stream, c.writer.task)) {
      report("WAW", who.label, c.writer, first);
      is_reported = true;
    }
  }
  // All bytes have the same history from here on: one cell, however many there were.
  cells_.erase(begin, cell);
  cells_.emplace(range.begin, Cell{range.end, true, {who.stream, who.task, who.label}, {}});
}

void Races::report(const char* kind, const std::string& who, const Access& before, std::string& first) {
  std::string text = std::string(kind) + ": " + who + " is not ordered after " + before.label;
  if (found_.size() < kMostReports) found_.push_back(text);
  if (first.empty()) first = std::move(text);
}

}  // namespace simulated
