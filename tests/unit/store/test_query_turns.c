/* Who has the querier, and who is next. */
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/shard/shard_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>

enum {
    N_WORKS = 4
};

static struct kvs_shard *data;
static struct kvs_request *works;

static int set_up(void **state)
{
    (void)state;
    data = calloc(1, sizeof(*data));
    works = calloc(N_WORKS, sizeof(*works));
    if (data == NULL || works == NULL)
        return -1;
    data->clients = calloc(1, sizeof(*data->clients));
    if (data->clients == NULL)
        return -1;
    data->n_clients = 1;
    kvs_shard_queues_init(data);
    data->op_state[KV_OP_QUERY] = kvs_op_query_open(data);
    if (data->op_state[KV_OP_QUERY] == NULL)
        return -1;
    for (int i = 0; i < N_WORKS; i++) {
        works[i].shard = data;
        works[i].client = &data->clients[0];
        works[i].type = &kvs_ops[KV_OP_QUERY];
        works[i].header.op = KV_OP_QUERY;
        if (i > 0)
            kvs_request_queue_at(&works[i], &kvs_query_queue_of(data)->waiting);
    }
    kvs_query_queue_of(data)->owner = &works[0];
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_op_query_close(data->op_state[KV_OP_QUERY]);
    free(works);
    free(data->clients);
    free(data);
    return 0;
}

static bool has_turn(const struct kvs_request *work)
{
    return work->queue == &work->client->queues[KV_PRIORITY_QUERY].requests &&
           kvs_query_queue_of(data)->owner == work;
}

/* One after the other, in the order in which they came, also where one ends before its turn. */
static void passes_on(void **state)
{
    (void)state;
    kvs_op_query_release(&works[2]); /* not his */
    assert_ptr_equal(kvs_query_queue_of(data)->owner, &works[0]);
    for (int i = 0; i + 1 < N_WORKS; i++) {
        kvs_op_query_release(&works[i]);
        assert_true(has_turn(&works[i + 1]));
        assert_int_equal(kvs_query_queue_of(data)->waiting.first != NULL, i + 2 < N_WORKS);
    }
    kvs_op_query_release(&works[N_WORKS - 1]);
    assert_null(kvs_query_queue_of(data)->owner);
    assert_null(kvs_query_queue_of(data)->waiting.first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(passes_on, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
