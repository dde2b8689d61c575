-- abandon: a batch for a version that its requests ask for, and whose workers are all gone, is removed. The caller has
-- answered all of its requests.
--
-- KEYS  1 the stream of the version   2 progress of the batch
-- ARGV  1 entry ID
-- Returns 1, or 0 if it was settled meanwhile. O(bytes of the batch).
-- GRANT batcher batches_of xack xdel
-- GRANT batcher progress del
redis.pcall('XACK', KEYS[1], 'workers', ARGV[1]) -- must be the first write: see deliver.lua
redis.call('DEL', KEYS[2])
return redis.call('XDEL', KEYS[1], ARGV[1])
