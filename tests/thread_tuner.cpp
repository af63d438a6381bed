// For each line (seconds of a step on all threads, on one, whether that has assistants, and whether they were
// undisturbed) prints whether the tuner chose all threads.

#include "../h2o_stream/native/src/thread_tuner.h"

#include <cstdio>

int main() {
  ThreadTuner tuner;
  double parallel, serial;
  int assisted, undisturbed;
  while (std::scanf("%lf %lf %d %d", &parallel, &serial, &assisted, &undisturbed) == 4) {
    const bool all = tuner.choose(2) == 2;
    std::printf("%d\n", all);
    tuner.record(all ? parallel : serial, assisted, !all && undisturbed);
  }
}
