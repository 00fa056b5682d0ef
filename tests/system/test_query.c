/* Retrieval from two nodes that are processes of their own, over tcp and over shared memory:
 * the suite that conformance.query runs inside one process. */
#include "tests/system/system.h"

#include <stdio.h>
#include <string.h>

static const char *suite;

static void run_over(const char *transport)
{
    const char *const options[] = {"--transport", transport, NULL};
    struct process_node nodes[2];
    char addresses[160], line[PROCESS_LINE_BYTES];
    const char *const argv[] = {suite, "connect", addresses, transport, NULL};
    struct process_spec spec = {.argv = argv};
    struct process process;

    memset(nodes, 0, sizeof(nodes));
    for (unsigned i = 0; i < 2; i++)
        system_node_start(&nodes[i], options);
    snprintf(addresses, sizeof(addresses), "%s,%s", nodes[0].control, nodes[1].control);
    assert_true(process_start(&process, &spec));
    while (process_read_line(&process, line, 5 * PROCESS_PATIENCE_MS))
        print_message("%s\n", line);
    assert_int_equal(process_wait(&process, PROCESS_PATIENCE_MS), 0);
    for (unsigned i = 0; i < 2; i++)
        system_node_stop(&nodes[i]);
}

static void over_tcp(void **state)
{
    (void)state;
    run_over("tcp");
}

static void over_shared_memory(void **state)
{
    (void)state;
    run_over("shm");
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(over_tcp),
        cmocka_unit_test(over_shared_memory),
    };

    if (argc != 2)
        return 2;
    suite = argv[1];
    return cmocka_run_group_tests_name("system.query", tests, NULL, NULL);
}

static int no_children(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return 2;
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, no_children);
}
