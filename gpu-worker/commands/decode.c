/* decode: answers the prompt of a kvworker prefill, whose rows may still be coming. */
#include "gpu-worker/commands/conversation.h"

#include <inttypes.h>

static int answer(struct kvw_conversation *conversation)
{
    struct kvw_context *worker = conversation->worker;
    const struct kvw_record *record = &conversation->record;
    struct kvw_generate_result result;
    int outcome;

    if (conversation->is_new) {
        kvw_error(worker, "session %s: no such session", conversation->name);
        return KVW_USAGE;
    }
    outcome = kvw_conversation_fit(conversation, record->n_tokens);
    if (outcome == KVW_DONE)
        outcome =
            kvw_conversation_answer(conversation, record->tokens, record->n_tokens, &result);
    if (outcome == KVW_DONE && !worker->options->json)
        kvw_report_text(worker, &result);
    return outcome;
}

int kvw_decode_run(struct kvw_context *worker)
{
    struct kvw_conversation conversation;
    int outcome;

    if (worker->options->session[0] == '\0') {
        kvw_error(worker, "option: --session: missing");
        return KVW_USAGE;
    }
    if ((outcome = kvw_open_file(worker)) != KVW_DONE ||
        (outcome = kvw_open_model(worker)) != KVW_DONE)
        return outcome;
    outcome = kvw_conversation_open(&conversation, worker);
    if (outcome == KVW_DONE)
        outcome = answer(&conversation);
    kvw_conversation_close(&conversation);
    return outcome;
}
