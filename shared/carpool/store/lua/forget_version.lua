-- forget_version: a version whose workers are gone has no batch stream any more, unless that has batches. Should a
-- worker of it be about to start, its next fetch finds that the stream is missing, and it registers again.
--
-- KEYS  1 the stream of the version   2 versions
-- ARGV  1 the version
-- Returns 1 if it is forgotten, else 0. O(consumers).
-- GRANT batcher batches_of xlen del
-- GRANT batcher versions srem
if redis.call('XLEN', KEYS[1]) > 0 then return 0 end
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[1])
return 1
