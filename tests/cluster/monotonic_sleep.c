/* To be preloaded before libfaketime 0.9.10, whose clock_nanosleep takes the shift of the real-time
   clock off a time of the monotonic one, which it was told to leave alone: Python cannot sleep. */

#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
}
