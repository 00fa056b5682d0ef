#include "kvserver/cluster/members.h"

#include "kvserver/base/hash.h"
#include "proto/kv_types.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool has_name(const struct kv_member *member)
{
    return member->name != NULL && member->name[0] != '\0';
}

/* What identifies a member, in messages too. */
static const char *called(const struct kv_member *member)
{
    return has_name(member) ? member->name : member->address;
}

static uint64_t text_hash(const char *text)
{
    const struct kv_id128 hash = kv_hash128(text, strlen(text));
    uint64_t id;

    memcpy(&id, hash.bytes, sizeof(id));
    return id;
}

static int compare_ids(const void *a, const void *b)
{
    const struct kv_member *const *left = a, *const *right = b;

    return ((*left)->id > (*right)->id) - ((*left)->id < (*right)->id);
}

/* A hash over (id, weight) of all members, in the order of their ids. */
static kv_status_t compute_epoch(struct kv_members *map)
{
    const struct kv_member **sorted = malloc(map->n_members * sizeof(*sorted));
    uint64_t epoch = map->n_members;

    if (sorted == NULL)
        return KV_NO_MEMORY;
    for (uint32_t i = 0; i < map->n_members; i++)
        sorted[i] = &map->members[i];
    qsort(sorted, map->n_members, sizeof(*sorted), compare_ids);
    for (uint32_t i = 0; i < map->n_members; i++)
        epoch = kv_mix64(kv_mix64(epoch ^ sorted[i]->id) + sorted[i]->weight);
    free(sorted);
    map->epoch = epoch != 0 ? epoch : 1;
    return KV_OK;
}

/* Compares a member with those before it. */
static kv_status_t check_twins(const char *what,
                               const struct kv_members *map,
                               uint32_t at,
                               char *detail,
                               size_t detail_bytes)
{
    const struct kv_member *member = &map->members[at];

    for (uint32_t i = 0; i < at; i++) {
        const struct kv_member *other = &map->members[i];

        if (strcmp(other->address, member->address) == 0) {
            snprintf(detail, detail_bytes, "%s: twice in the list: %.200s", what,
                     member->address);
            return KV_INVALID;
        }
        if (other->id == member->id) {
            snprintf(detail, detail_bytes, "%s: twice in the list: %.200s: %.200s and %.200s",
                     what, called(member), other->address, member->address);
            return KV_INVALID;
        }
    }
    return KV_OK;
}

/* A blank beside a comma would make another node of it; what steers a terminal would do so in
 * messages: C0, DEL, and C1 in UTF-8. */
static bool is_visible(const char *text)
{
    for (const uint8_t *at = (const uint8_t *)text; at[0] != 0; at++)
        if (at[0] <= ' ' || at[0] == 0x7f || (at[0] == 0xc2 && at[1] >= 0x80 && at[1] <= 0x9f))
            return false;
    return true;
}

kv_status_t
kv_member_check_name(const char *what, const char *name, char *detail, size_t detail_bytes)
{
    if (strlen(name) > KV_NAME_BYTES_MAX)
        snprintf(detail, detail_bytes, "%s: name: %.20s...: more than %d bytes", what, name,
                 KV_NAME_BYTES_MAX);
    else if (!is_visible(name))
        snprintf(detail, detail_bytes, "%s: name: a blank or a control character in it", what);
    else if (strpbrk(name, ",=") != NULL)
        snprintf(detail, detail_bytes, "%s: name: %s: a comma or an equals sign in it", what,
                 name);
    else
        return KV_OK;
    return KV_INVALID;
}

/* Looks at a member alone. */
static kv_status_t check_member(const char *what,
                                const struct kv_member *member,
                                char *detail,
                                size_t detail_bytes)
{
    if (kv_member_check_name(what, member->name, detail, detail_bytes) != KV_OK)
        return KV_INVALID;
    if (!is_visible(member->address)) {
        snprintf(detail, detail_bytes, "%s: address: a blank or a control character in it",
                 what);
        return KV_INVALID;
    }
    if (member->weight > KV_MEMBER_WEIGHT_MAX) {
        snprintf(detail, detail_bytes, "%s: weight of %.200s: %u: limit %d", what,
                 called(member), member->weight, KV_MEMBER_WEIGHT_MAX);
        return KV_INVALID;
    }
    return KV_OK;
}

static kv_status_t
check(const char *what, const struct kv_members *map, char *detail, size_t detail_bytes)
{
    for (uint32_t i = 0; i < map->n_members; i++) {
        kv_status_t status = check_member(what, &map->members[i], detail, detail_bytes);

        if (status == KV_OK)
            status = check_twins(what, map, i, detail, detail_bytes);
        if (status != KV_OK)
            return status;
    }
    return KV_OK;
}

/* Copies a text to *at and advances *at. */
static const char *keep(char **at, const char *text)
{
    const size_t bytes = strlen(text) + 1;
    char *copy = memcpy(*at, text, bytes);

    *at += bytes;
    return copy;
}

kv_status_t kv_members_create(const char *what,
                              const struct kv_member *members,
                              uint32_t n_members,
                              struct kv_members **ret_members,
                              char *detail,
                              size_t detail_bytes)
{
    size_t text_bytes = 0;
    struct kv_members *map;
    kv_status_t status;
    char *at;

    if (n_members == 0 || n_members > KV_NODES_MAX) {
        snprintf(detail, detail_bytes,
                 n_members == 0 ? "%s: no nodes" : "%s: too many nodes: limit %d", what,
                 KV_NODES_MAX);
        return KV_INVALID;
    }
    for (uint32_t i = 0; i < n_members; i++)
        text_bytes += strlen(members[i].address) + 2 +
                      (has_name(&members[i]) ? strlen(members[i].name) : 0);
    map = malloc(sizeof(*map) + n_members * sizeof(map->members[0]) + text_bytes);
    if (map == NULL) {
        snprintf(detail, detail_bytes, "%s: out of memory", what);
        return KV_NO_MEMORY;
    }
    map->n_members = n_members;
    at = (char *)&map->members[n_members];
    for (uint32_t i = 0; i < n_members; i++) {
        struct kv_member *member = &map->members[i];

        member->name = keep(&at, has_name(&members[i]) ? members[i].name : "");
        member->address = keep(&at, members[i].address);
        member->weight = members[i].weight > 0 ? members[i].weight : 1;
        member->id = text_hash(called(member));
    }
    status = check(what, map, detail, detail_bytes);
    if (status == KV_OK) {
        status = compute_epoch(map);
        if (status != KV_OK)
            snprintf(detail, detail_bytes, "%s: out of memory", what);
    }
    if (status != KV_OK) {
        free(map);
        return status;
    }
    *ret_members = map;
    return KV_OK;
}

/* ---- the list ---------------------------------------------------------------------------- */

static uint32_t count_entries(const char *text)
{
    uint32_t n = 1;

    for (; *text != '\0'; text++)
        n += *text == ',';
    return n;
}

/* Splits one entry in place.  Returns false if it is none. */
static bool split_entry(char *entry, struct kv_member *ret_member)
{
    char *equals = strchr(entry, '=');

    *ret_member = (struct kv_member){.address = entry};
    if (equals != NULL && equals > entry) {
        *equals = '\0';
        ret_member->name = entry;
        ret_member->address = equals + 1;
    }
    return strchr(ret_member->address, ':') != NULL && strchr(ret_member->address, '=') == NULL;
}

static kv_status_t get_static(const char *what,
                              const char *text,
                              struct kv_members **ret_members,
                              char *detail,
                              size_t detail_bytes)
{
    const uint32_t n = count_entries(text);
    struct kv_member *list = calloc(n, sizeof(*list));
    char *copy = strdup(text), *rest = copy;
    kv_status_t status = KV_NO_MEMORY;

    snprintf(detail, detail_bytes, "%s: out of memory", what);
    if (list == NULL || copy == NULL)
        goto out;
    for (uint32_t i = 0; i < n; i++) {
        char *entry = rest, *comma = strchr(rest, ',');

        if (comma != NULL) {
            *comma = '\0';
            rest = comma + 1;
        }
        if (!split_entry(entry, &list[i])) {
            snprintf(detail, detail_bytes, "%s: not HOST:PORT: %.200s", what,
                     list[i].address[0] != '\0' ? list[i].address : "an empty address");
            status = KV_INVALID;
            goto out;
        }
    }
    status = kv_members_create(what, list, n, ret_members, detail, detail_bytes);

out:
    free(list);
    free(copy);
    return status;
}

const struct kv_members_source kv_members_static = {"static", get_static};
