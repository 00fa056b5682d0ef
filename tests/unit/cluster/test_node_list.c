/* cluster/node_list.h: what is a list of nodes, and what the others are told. */
#include "kvserver/cluster/node_list.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

enum {
    NODES = 3
};

static char list[512], detail[256];
static const char *nodes[NODES];
static uint32_t n;

static kv_status_t split(const char *text)
{
    snprintf(list, sizeof(list), "%s", text);
    detail[0] = '\0';
    return kv_node_list_split("nodes", list, NODES, nodes, &n, detail, sizeof(detail));
}

static void test_lists(void **state)
{
    (void)state;
    assert_int_equal(split("a:1"), KV_OK);
    assert_int_equal(n, 1);
    assert_string_equal(nodes[0], "a:1");
    assert_int_equal(split("b:1,[::1]:7400,a:1"), KV_OK);
    assert_int_equal(n, 3);
    assert_string_equal(nodes[0], "b:1");
    assert_string_equal(nodes[1], "[::1]:7400");
    assert_string_equal(nodes[2], "a:1");
}

static void test_refused(void **state)
{
    static const struct {
        const char *list, *detail;
    } cases[] = {
        {"", "nodes: not HOST:PORT: an empty address"},
        {"a:1,", "nodes: not HOST:PORT: an empty address"},
        {"a:1,,b:1", "nodes: not HOST:PORT: an empty address"},
        {"a:1,b", "nodes: not HOST:PORT: b"},
        {"a:1,b:1,a:1", "nodes: twice in the list: a:1"},
        {"a:1,b:1,c:1,d:1", "nodes: too many nodes: limit 3"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(split(cases[i].list), KV_INVALID);
        assert_string_equal(detail, cases[i].detail);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
