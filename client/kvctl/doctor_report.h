/* doctor_report.h - the output of kvctl doctor.  A finding is one line:
 *
 *     warn  shared memory: /dev/shm has 64M: give the container more (--shm-size 1g)
 *
 * Threads: none of its own.  Memory: the caller's.
 */
#ifndef KV_CLIENT_KVCTL_DOCTOR_REPORT_H
#define KV_CLIENT_KVCTL_DOCTOR_REPORT_H

#include "client/kvctl/kvctl.h"

enum kvctl_verdict {
    KVCTL_OK,   /* as it should be */
    KVCTL_WARN, /* works, but slower, smaller or less safe than it could */
    KVCTL_FAIL, /* does not work */
};

struct kvctl_doctor {
    const struct kvctl *ctl;
    const char *node; /* the findings are about; NULL: this machine */
    unsigned n_failed;
};

/* Prints one finding; `advice` may be NULL. */
void kvctl_doctor_tell(struct kvctl_doctor *doctor,
                       enum kvctl_verdict verdict,
                       const char *what,
                       const char *advice,
                       const char *format,
                       ...) __attribute__((format(printf, 5, 6)));

#endif
