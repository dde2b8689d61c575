-- reassign: a batch for a version whose workers are all gone is given to the workers of any version. It becomes a batch
-- of the common stream, with another ID. Its last owner, should it still live, is fenced.
--
-- KEYS  1 the stream of the version   2 batches   3 progress of the batch   4 progress prefix (the key of batch ID '';
--       the ID is appended)
-- ARGV  1 entry ID
-- Returns the new ID, or nil if the batch was settled meanwhile. O(bytes of the batch).
-- GRANT batcher batches_of xrange xpending xack xdel
-- GRANT batcher batches xadd
-- GRANT batcher progress exists rename
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return nil end
local pending = redis.pcall('XPENDING', KEYS[1], 'workers', ARGV[1], ARGV[1], 1)
local fields = {}
for f = 1, #entry[2], 2 do
  if entry[2][f] ~= 'version' then
    fields[#fields + 1] = entry[2][f]
    fields[#fields + 1] = entry[2][f + 1]
  end
end
if not pending.err and pending[1] then
  fields[#fields + 1] = 'redelivered'
  fields[#fields + 1] = pending[1][4]
end
-- XACK must be the first write: see deliver.lua. It fails if no worker ever read the stream.
redis.pcall('XACK', KEYS[1], 'workers', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local id = redis.call('XADD', KEYS[2], '*', unpack(fields))
if redis.call('EXISTS', KEYS[3]) == 1 then redis.call('RENAME', KEYS[3], KEYS[4] .. id) end
return id
