#include "client/kvctl/doctor_report.h"

#include "kvserver/base/json.h"

#include <stdarg.h>
#include <stdio.h>

void kvctl_doctor_tell(struct kvctl_doctor *doctor,
                       enum kvctl_verdict verdict,
                       const char *what,
                       const char *advice,
                       const char *format,
                       ...)
{
    static const char *const names[] = {
        [KVCTL_OK] = "ok",
        [KVCTL_WARN] = "warn",
        [KVCTL_FAIL] = "fail",
    };
    char detail[KVCTL_DETAIL_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(detail, sizeof(detail), format, arguments);
    va_end(arguments);
    doctor->n_failed += verdict == KVCTL_FAIL;
    if (doctor->ctl->options.json) {
        struct kv_json json;

        kv_json_begin(&json, stdout);
        kv_json_text(&json, "node", doctor->node != NULL ? doctor->node : "");
        kv_json_text(&json, "verdict", names[verdict]);
        kv_json_text(&json, "what", what);
        kv_json_text(&json, "detail", detail);
        kv_json_text(&json, "advice", advice != NULL ? advice : "");
        kv_json_end(&json);
        return;
    }
    printf("%-4s  ", names[verdict]);
    if (doctor->node != NULL)
        printf("node %s: ", doctor->node);
    printf("%s: %s%s%s\n", what, detail, advice != NULL ? ": " : "",
           advice != NULL ? advice : "");
    fflush(stdout);
}
