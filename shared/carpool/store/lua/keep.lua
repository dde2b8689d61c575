-- keep: add a request whose result is kept for whoever asks for it by name, unless it was added before.
--
-- The reply stream of the request is made with it, empty. It expires with the result: so if it is not there while the
-- request is known, there was a result.
--
-- KEYS  1 requests  2 kept  3 replies  4 body, if it is large: it is stored under this key
-- ARGV  1 fingerprint of the request  2 how long that is known (ms)  3 how long a stored body is kept (ms)
--       4 the stored body, else empty  5.. field, value, ...: the entry of the request
-- Returns the fingerprint with which the request was added before, or false if it was added now. O(1).
-- GRANT gateway kept get set
-- GRANT gateway body set
-- GRANT gateway requests xadd
-- GRANT gateway replies xgroup|create xgroup|destroy pexpire
local earlier = redis.call('GET', KEYS[2])
if earlier then return earlier end
-- First what may be refused, because the memory is full or the key has another type: then nothing is written. By a
-- group, so that gateways need no permission to write results.
redis.call('XGROUP', 'CREATE', KEYS[3], 'made', '0', 'MKSTREAM')
redis.call('XGROUP', 'DESTROY', KEYS[3], 'made')
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if KEYS[4] then redis.call('SET', KEYS[4], ARGV[4], 'PX', ARGV[3]) end
redis.call('XADD', KEYS[1], '*', unpack(ARGV, 5))
return false
