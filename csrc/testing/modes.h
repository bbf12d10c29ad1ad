// The main function of a driver: runs the mode that its only argument names.
#pragma once

#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace fastlin {

struct Mode {
  const char* name;
  int (*run)();
};

// The status of the mode; 2, with the names of all modes, for another argument.
inline int run_mode(int count, char** arguments, std::initializer_list<Mode> modes) {
  for (const Mode& mode : modes) {
    if (count == 2 && std::strcmp(arguments[1], mode.name) == 0) return mode.run();
  }
  std::puts("wants one of:");
  for (const Mode& mode : modes) std::puts(mode.name);
  return 2;
}

}  // namespace fastlin
