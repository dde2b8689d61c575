-- undrain: a process that drained because an operator said so takes batches again, or of a bound model begins
-- sequences.
--
-- KEYS  1 draining   2 settled
-- ARGV  1 consumer   2 maximum length of `settled`
-- Returns 1. O(1).
-- GRANT worker draining srem
-- GRANT worker settled xadd
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'worker', ARGV[1], 'size', 0)
return 1
