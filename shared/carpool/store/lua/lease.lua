-- lease: become the one active batcher of a model, renew its lease, or give it back.
--
-- KEYS  1 batcher
-- ARGV  1 name of this batcher  2 lease (ms), 0 to give it back
-- Returns 1 if this batcher holds the lease now, else 0. O(1).
-- GRANT batcher batcher get set del
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return 0
end
redis.call('DEL', KEYS[1]) -- must be the first write: see deliver.lua
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
