/* ops_model.c - models: a model's name and schema are checked, saved on the disk, and kept in a
 * table. */
#include "kvserver/base/hash.h"
#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/store/control/ops_private.h"
#include "kvserver/store/control/protobuf.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kvs_model *kvs_model_find(struct kvs_control *control,
                                 const struct kv_id128 *fingerprint)
{
    for (uint32_t i = 0; i < control->n_models; i++)
        if (kv_token_equal(&control->models[i]->info.fingerprint, fingerprint))
            return control->models[i];
    return NULL;
}

static bool same_schema(const kv_schema_t *a, const kv_schema_t *b)
{
    return a->n_layers == b->n_layers && a->n_units == b->n_units &&
           memcmp(a->layers, b->layers, a->n_layers * sizeof(a->layers[0])) == 0;
}

/* Gives a model what it has checked and kept from the request, and the id that follows. */
static void set_info(struct kvs_model *model, const struct kv_model_info *info)
{
    const kv_schema_t *schema = &info->schema;
    struct {
        struct kv_id128 fingerprint;
        struct kv_layer_schema layers[KV_LAYERS_MAX];
    } hashed = {.fingerprint = info->fingerprint};

    static_assert(sizeof(struct kv_layer_schema) == 16, "no bytes that nobody sets");
    memcpy(hashed.layers, schema->layers, schema->n_layers * sizeof(schema->layers[0]));
    model->info = *info;
    model->rows_id = kv_hash128(&hashed, sizeof(hashed));
}

static void model_saved(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_control_call *call = arg;
    struct kvs_control *control = call->control;

    (void)bytes;
    call->model->saving = false;
    if (status == KV_OK) {
        kvs_call_reply_ok(call);
        return;
    }
    for (uint32_t i = 0; i < control->n_models; i++)
        if (control->models[i] == call->model)
            control->models[i] = control->models[--control->n_models];
    free(call->model);
    kvs_control_refuse(call, status, "model: cannot be saved: %s", kv_status_name(status));
}

static kv_status_t model_from(const Kvpb__ModelRequest *request,
                              struct kv_model_info *info,
                              char *detail,
                              size_t detail_bytes)
{
    memset(info, 0, sizeof(*info));
    if (!kvs_pb_get_id(&request->fingerprint, &info->fingerprint) || request->name[0] == '\0' ||
        strlen(request->name) > KV_NAME_BYTES_MAX || request->n_layers > KV_LAYERS_MAX) {
        snprintf(detail, detail_bytes,
                 "model: invalid name (%zu bytes), fingerprint (%zu bytes) or number of layers "
                 "(%zu)",
                 strlen(request->name), request->fingerprint.len, request->n_layers);
        return KV_INVALID;
    }
    kvs_pb_copy_text(info->name, sizeof(info->name), request->name);
    info->schema.n_layers = (uint32_t)request->n_layers;
    for (size_t i = 0; i < request->n_layers; i++) {
        const Kvpb__Layer *layer = request->layers[i];

        if (layer->kind > UINT8_MAX || layer->dtype > UINT8_MAX ||
            layer->n_kv_heads > UINT16_MAX || layer->d_k > UINT16_MAX ||
            layer->d_v > UINT16_MAX) {
            snprintf(detail, detail_bytes, "model: layer %zu: value out of range", i);
            return KV_INVALID;
        }
        info->schema.layers[i] = (struct kv_layer_schema){
            .kind = (uint8_t)layer->kind,
            .dtype = (uint8_t)layer->dtype,
            .n_kv_heads = (uint16_t)layer->n_kv_heads,
            .d_k = (uint16_t)layer->d_k,
            .d_v = (uint16_t)layer->d_v,
        };
    }
    return kv_schema_finish(&info->schema, detail, detail_bytes);
}

/* The key of a model's record on the disk. */
struct model_key {
    char bytes[6 + sizeof(struct kv_id128)];
};

static struct model_key model_key(const struct kv_id128 *fingerprint)
{
    struct model_key key;

    memcpy(key.bytes, "model/", 6);
    memcpy(key.bytes + 6, fingerprint, sizeof(*fingerprint));
    return key;
}

/* Starts to save the call's message as the model's record. */
static kv_status_t model_save(struct kvs_control_call *call, const struct kv_id128 *fingerprint)
{
    const struct model_key key = model_key(fingerprint);

    call->record = malloc(call->packed_bytes);
    if (call->record == NULL)
        return KV_NO_MEMORY;
    memcpy(call->record, call->packed, call->packed_bytes);
    const struct kv_disk_write write = {.key = key.bytes,
                                        .key_bytes = sizeof(key.bytes),
                                        .value = call->record,
                                        .value_bytes = call->packed_bytes};

    return kv_disk_write(call->control->disk, KV_DISK_RECORDS, &write, 1, model_saved, call);
}

/* Forgets the least recently used model if the table is full.  Returns false if all are in use.
 */
static bool model_make_room(struct kvs_control *control)
{
    uint32_t oldest = KVS_MODELS_MAX;

    if (control->n_models < KVS_MODELS_MAX)
        return true;
    for (uint32_t i = 0; i < control->n_models; i++) {
        const struct kvs_model *model = control->models[i];

        if (model->n_sessions == 0 && !model->saving &&
            (oldest == KVS_MODELS_MAX || model->used_us < control->models[oldest]->used_us))
            oldest = i;
    }
    if (oldest == KVS_MODELS_MAX)
        return false;
    struct model_key key = model_key(&control->models[oldest]->info.fingerprint);
    kv_log(KV_LOG_INFO, "model: %s: forgotten to make room: no session uses it",
           control->models[oldest]->info.name);
    const struct kv_disk_write removal = {.key = key.bytes, .key_bytes = sizeof(key.bytes)};
    if (kv_disk_write(control->disk, KV_DISK_RECORDS, &removal, 1, NULL, NULL) != KV_OK)
        kv_log(KV_LOG_WARN, "model: %s: its record stays on disk, and is loaded again",
               control->models[oldest]->info.name);
    free(control->models[oldest]);
    control->models[oldest] = control->models[--control->n_models];
    return true;
}

static void model(struct kvs_control_call *call, const Kvpb__ModelRequest *request)
{
    struct kvs_control *control = call->control;
    struct kv_model_info info;
    char detail[256] = "";

    kv_status_t status = model_from(request, &info, detail, sizeof(detail));
    if (status != KV_OK) {
        kvs_control_refuse(call, status, "%s", detail);
        return;
    }
    struct kvs_model *known = kvs_model_find(control, &info.fingerprint);
    if (known != NULL) {
        known->used_us = kv_clock_now(control->config.clock);
        if (!same_schema(&known->info.schema, &info.schema))
            kvs_control_refuse(
                call, KV_EXISTS,
                "model: %s: model %s has the same fingerprint but another schema", info.name,
                known->info.name);
        else if (known->saving)
            kvs_control_refuse(call, KV_BUSY, "model: %s: is still being saved", info.name);
        else
            kvs_call_reply_ok(call);
        return;
    }
    if (!model_make_room(control)) {
        kvs_control_refuse(call, KV_NO_MEMORY, "model: %s: too many models in use: limit %d",
                           info.name, KVS_MODELS_MAX);
        return;
    }
    struct kvs_model *added = calloc(1, sizeof(*added));
    if (added == NULL) {
        kvs_control_refuse(call, KV_NO_MEMORY, "model: out of memory");
        return;
    }
    set_info(added, &info);
    added->saving = true;
    added->used_us = kv_clock_now(control->config.clock);
    call->model = added;
    status = model_save(call, &info.fingerprint);
    if (status != KV_OK) {
        free(added);
        kvs_control_refuse(call, status, "model: cannot be saved: %s", kv_status_name(status));
        return;
    }
    control->models[control->n_models++] = added;
    kv_log(KV_LOG_INFO, "model: %s: %u layers, %u units, %llu bytes per token", info.name,
           info.schema.n_layers, info.schema.n_units,
           (unsigned long long)kv_schema_token_bytes(&info.schema));
}

/* Adds a model from its saved request.  Returns false if the record is not valid. */
static bool restore(struct kvs_control *control, const void *packed, size_t packed_bytes)
{
    Kvpb__ModelRequest *request = kvpb__model_request__unpack(NULL, packed_bytes, packed);
    struct kvs_model *added = calloc(1, sizeof(*added));
    struct kv_model_info info;
    char detail[256];
    bool good = request != NULL && added != NULL &&
                model_from(request, &info, detail, sizeof(detail)) == KV_OK;

    if (good) {
        set_info(added, &info);
        control->models[control->n_models++] = added;
    } else {
        free(added);
    }
    kvpb__model_request__free_unpacked(request, NULL);
    return good;
}

static void
load(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct kvs_control *control = arg;

    (void)key;
    (void)key_bytes;
    if (control->n_models == KVS_MODELS_MAX)
        kv_log(KV_LOG_WARN, "model: more than %d on disk, one skipped", KVS_MODELS_MAX);
    else if (!restore(control, value, value_bytes))
        kv_log(KV_LOG_WARN, "model: corrupt record on disk, skipped: %zu bytes", value_bytes);
}

kv_status_t kvs_models_load(struct kvs_control *control)
{
    return kv_disk_scan(control->config.disk, KV_DISK_RECORDS, "model/", 6, load, control);
}

void kvs_control_model(struct kvs_control_call *call)
{
    Kvpb__ModelRequest *request = kvs_call_unpack(call, &kvpb__model_request__descriptor);

    if (request == NULL)
        return;
    model(call, request);
    kvpb__model_request__free_unpacked(request, NULL);
}
