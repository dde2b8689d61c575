-- status: what the active batcher says of itself, for whoever watches.
--
-- KEYS  1 status
-- ARGV  1 what it says  2 for how long (ms)
-- O(1).
redis.call('DEL', KEYS[1]) -- first what Redis allows when memory is full: that is when somebody looks
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
