// For modules of wheels: what the compiler or its libraries take from a glibc newer than 2.28 and have no older version
// of. Each does what the newer glibc does. .ci/wheels.py links it into every module, where nobody else sees it.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#pragma GCC visibility push(hidden)

// glibc 2.32. 0: there may be several threads, so that reference counts are always changed by atomic operations.
char __libc_single_threaded = 0;

// glibc 2.33. Older ones have it under another name.
int fstat(int fd, struct stat* status) { return (int)syscall(SYS_fstat, fd, status); }

// glibc 2.30. Older ones wait by the time of day alone.
int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const struct timespec* until) {
  struct timespec now, day;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &day);
  day.tv_sec += until->tv_sec - now.tv_sec;
  day.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (day.tv_nsec < 0) day.tv_nsec += 1000000000, --day.tv_sec;
  if (day.tv_nsec >= 1000000000) day.tv_nsec -= 1000000000, ++day.tv_sec;
  return pthread_mutex_timedlock(mutex, &day);
}

// glibc 2.36. The C++ library has it for std::random_device.
uint32_t arc4random(void) {
  uint32_t value;
  while (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
  }
  return value;
}
