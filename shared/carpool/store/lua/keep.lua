-- keep: add a request whose result is kept for whoever asks for it by ID, unless it was added before.
--
-- The reply stream of the request is made with it, empty. It expires with the result: so if it is not there while the
-- request is known, there was a result. What the request is, and what became of it, is in its record (record.lua).
--
-- KEYS  1 requests  2 kept: the record  3 replies  4 body, if it is large: it is stored under this key
-- ARGV  1 fingerprint of the request  2 how long that is known (ms)
--       3 how long its result is kept (ms), '-' if its model decides
--       4 '1' if a request of this ID whose result has expired may be executed again, else ''
--       5 how long a stored body is kept (ms)  6 the stored body, else empty
--       7.. field, value, ...: the entry of the request
-- Returns the fingerprint with which the request was added before, or false if it was added now. O(1).
-- GRANT producer,gateway kept get set
-- GRANT producer,gateway body set
-- GRANT producer,gateway requests xadd
-- GRANT producer,gateway replies exists xgroup|create xgroup|destroy xtrim pexpire
local record = redis.call('GET', KEYS[2])
if record and (ARGV[4] == '' or redis.call('EXISTS', KEYS[3]) == 1) then return string.match(record, '^%S+') end
-- First what may be refused, because the memory is full or the key has another type: then nothing is written. By a
-- group, so that producers need no permission to write results.
redis.call('XGROUP', 'CREATE', KEYS[3], 'made', '0', 'MKSTREAM')
redis.call('XGROUP', 'DESTROY', KEYS[3], 'made')
redis.call('XTRIM', KEYS[3], 'MAXLEN', 0)  -- of an earlier request of this ID, which is known no longer
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('SET', KEYS[2], ARGV[1] .. ' waiting ' .. ARGV[3], 'PX', ARGV[2])
if KEYS[4] then redis.call('SET', KEYS[4], ARGV[6], 'PX', ARGV[5]) end
redis.call('XADD', KEYS[1], '*', unpack(ARGV, 7))
return false
