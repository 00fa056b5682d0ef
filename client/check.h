/* check.h - what always holds between the parts of a client, and what asserts it.
 *
 * Invariants, which kvc_client_check() asserts.  They hold between calls of the public
 * functions and between the turns of kv_poll().
 *
 * Lists
 *   (1) Each link's neighbors point back at it, and what it lies in is this client's.
 *
 * Loop
 *   (2) No operation's deadline, no attempt of a request or a call, and no renewal of a lease
 *       lies before next_due_us.
 *   (3) If a node has a failure noted, n_failed says that there are some.
 *
 * Nodes and connections
 *   (4) A node without a connection has no control transport, no data threads and no ping; one
 *       that is connected has all but the ping.
 *   (5) A node counts its requests that are not released, the bulk bytes of those, its calls
 *       that the control transport has, and its replies that are being received.  Exactly the
 *       nodes with calls are in the client's list; it counts those that watch it.
 *   (6) A connection counts its requests by priority; but for pings, there are no more of them
 *       than credits.
 *   (7) Numbers of object puts: those that ended are marked, from the first that did not to the
 *       next number, and nowhere else.
 *   (8) A sub-operation waits in the list of its operation's priority and is not finished.
 *       Exactly the connections with sub-operations wait in the client's list.
 *
 * Requests
 *   (9) A request that is not over is its owner's, or its node's ping; one that is over has no
 *       owner, and a send or a receive that is not over.
 *  (10) Its connection is one of its node's; its last id names its node and its slot.
 *  (11) Every large message buffer that was made is in a request or free, and never both; one
 *       that is free is not with the transport.
 *  (12) A buffer is held by every request with it that is not released, and by every operation
 *       with it that has not ended.
 *
 * Operations, calls and sessions
 *  (13) Exactly the operations that have begun and not ended are in the client's list, and in
 *       their sessions'; those with a rank in its list of these, too, by rank, and so are the
 *       sub-operations that wait.  One that has ended holds nothing.
 *  (14) One that is queued has begun nothing; one that runs waits for a request, a call or a
 *       sub-operation.
 *  (15) An operation counts its calls, the client those that prepare, a session those that are
 *       queued and those that are exclusive.
 *  (16) An operation of a session is queued exactly if it has to wait: behind an exclusive one,
 *       or being one behind any other.
 *  (17) A session's log is without gaps and ends at its generation, or, while a fork or
 *       truncate is under way, one behind it.
 *  (18) A call is in the lists of its operation and its session, if it has them, and in the
 *       heap of those that wait exactly while its control transport does not have it.
 *  (19) A session counts its renewals; a node catches up exactly while one call of that is
 *       there.
 *
 * Threads: the client's.  Memory: none.
 */
#ifndef KV_CLIENT_CHECK_H
#define KV_CLIENT_CHECK_H

struct kv_client;

/* Asserts the invariants, in time that grows with what the client has under way and can
 * have. */
void kvc_client_check(struct kv_client *client);

#endif
