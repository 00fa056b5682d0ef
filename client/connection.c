#include "client/connection.h"

#include "client/client.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/request.h"
#include "client/session.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"

#include <stdlib.h>

void kv_lane_init(struct kv_lane *lane, struct kv_remote *remote)
{
    lane->link.remote = remote;
    for (unsigned i = 0; i < KV_PRIORITY_COUNT; i++)
        kv_list_init(&lane->errands[i]);
}

bool kv_lane_put_begin(struct kv_lane *lane, uint32_t *ret_number)
{
    if (lane->put_next - lane->put_settled >= KV_WIRE_PUTS_MAX)
        return false;
    *ret_number = lane->put_next++;
    return true;
}

static uint64_t *ended_word(struct kv_lane *lane, uint32_t number)
{
    return &lane->puts_ended[number / 64 % (KV_WIRE_PUTS_MAX / 64)];
}

void kv_lane_put_end(struct kv_lane *lane, uint32_t number)
{
    *ended_word(lane, number) |= UINT64_C(1) << number % 64;
    while ((*ended_word(lane, lane->put_settled) >> lane->put_settled % 64 & 1) != 0) {
        *ended_word(lane, lane->put_settled) &= ~(UINT64_C(1) << lane->put_settled % 64);
        lane->put_settled++;
    }
}

struct kv_lane *kv_lane_of_unit(struct kv_client *client, uint32_t slot)
{
    struct kv_remote *remote = &client->remotes[client->placement.node_of[slot]];

    if (remote->n_lanes == 0)
        return NULL;
    return &remote->lanes[kv_placement_unit_thread(slot, client->n_remotes, remote->n_lanes)];
}

struct kv_lane *kv_lane_of_object(struct kv_client *client, uint32_t slot)
{
    struct kv_remote *remote = &client->remotes[client->placement.node_of[slot]];

    if (remote->n_lanes == 0)
        return NULL;
    return &remote->lanes[kv_placement_object_thread(slot, remote->n_lanes)];
}

struct kv_lane *kv_session_lane(const struct kv_session *session, uint32_t layer, uint32_t head)
{
    return kv_lane_of_unit(session->client,
                           session->slots[kv_schema_unit(&session->schema, layer, head)]);
}

void kv_lanes_unmark(struct kv_client *client)
{
    for (uint32_t i = 0; i < client->n_remotes; i++)
        for (uint32_t thread = 0; thread < client->remotes[i].n_lanes; thread++)
            client->remotes[i].lanes[thread].mark = NULL;
}

struct kv_errand *kv_errand_add(struct kv_op *op, struct kv_lane *lane)
{
    struct kv_client *client = op->client;
    struct kv_errand *errand = client->free_errands;

    if (errand != NULL) {
        client->free_errands = errand->next;
    } else {
        errand = malloc(sizeof(*errand));
        if (errand == NULL)
            return NULL;
    }
    *errand = (struct kv_errand){.op = op, .lane = lane};
    kv_list_append(&lane->errands[kv_op_priority(op->kind->id)], &errand->of_lane);
    kv_list_append(&op->errands, &errand->of_op);
    client->loop.must_dispatch = true;
    return errand;
}

void kv_errand_free(struct kv_errand *errand)
{
    struct kv_client *client = errand->op->client;

    kv_list_remove(&errand->of_lane);
    kv_list_remove(&errand->of_op);
    errand->next = client->free_errands;
    client->free_errands = errand;
}

/* Whether a credit is left for the priority besides those that the others are sure of. */
static bool may_take(const struct kv_lane *lane, enum kv_priority priority)
{
    uint32_t credits = lane->link.remote->credits;
    uint32_t sure = credits >= KV_PRIORITY_COUNT ? (credits + 15) / 16 : 0;
    uint32_t reserved = 0;

    for (unsigned other = 0; other < KV_PRIORITY_COUNT; other++)
        if (other != priority && lane->in_flight[other] < sure)
            reserved += sure - lane->in_flight[other];
    if (lane->in_flight[priority] < sure)
        return lane->n_in_flight < credits;
    return lane->n_in_flight + reserved < credits;
}

/* Sends one message, the most urgent that there is and that can.  An errand that finds no
 * trip or envelope stays where it is, and keeps those of its priority behind it in order.  false:
 * nothing was sent. */
static bool lane_send(struct kv_lane *lane)
{
    struct kv_client *client = lane->link.remote->client;
    const bool must_dispatch = client->loop.must_dispatch;

    for (unsigned i = 0; i < KV_PRIORITY_COUNT; i++) {
        struct kv_list *errands = &lane->errands[i];
        struct kv_errand *errand;
        struct kv_trip *trip;

        if (kv_list_empty(errands) || !may_take(lane, i))
            continue;
        errand = KV_LIST_ENTRY(errands->next, struct kv_errand, of_lane);
        trip = kvc_op_take_request(errand->op, lane);
        if (trip == NULL)
            return false;
        if (errand->op->kind->build(errand, trip) == KV_OK) {
            if (errand->finished)
                kv_errand_free(errand);
            kv_trip_send(trip);
            return true;
        }
        kv_trip_end(trip);
        /* That one came back is no reason to try again at once. */
        client->loop.must_dispatch = must_dispatch;
    }
    return false;
}

/* The lane whose turn it is. */
static struct kv_lane *take_turn(struct kv_client *client)
{
    while (client->turn_thread >= client->remotes[client->turn_node].n_lanes) {
        client->turn_thread = 0;
        client->turn_node = (client->turn_node + 1) % client->n_remotes;
    }
    return &client->remotes[client->turn_node].lanes[client->turn_thread++];
}

/* One message of each lane in turn: what all lanes share, trips and large envelopes, goes
 * around.  Where it runs out, the lane behind the last one that sent is the next, now or in a
 * later call. */
void kv_lanes_pump(struct kv_client *client)
{
    uint32_t n_lanes = 0, n_idle = 0;

    for (uint32_t i = 0; i < client->n_remotes; i++)
        n_lanes += client->remotes[i].n_lanes;
    while (n_idle < n_lanes) {
        struct kv_lane *lane = take_turn(client);
        const struct kv_remote *remote = lane->link.remote;
        bool may_send = remote->state == KV_REMOTE_CONNECTED && remote->failure == KV_OK;

        n_idle = may_send && lane_send(lane) ? 0 : n_idle + 1;
    }
}
