-- missing: which of these entries are no longer in a stream (removed by XDEL, taken by another batcher, or committed
-- without the caller having read of it).
--
-- Redis has no command that says whether an entry is there, and does not copy it. So only as many are looked up as have
-- the given number of bytes together, and the caller asks again for the others.
--
-- KEYS  1 a stream
-- ARGV  1 the number of bytes  2.. entry IDs, at least one
-- Returns { how many were looked up, the first ones; the IDs of those that are not in the stream ... }
-- O(entries looked up), and O(bytes): those given, and one entry.
-- GRANT batcher requests xrange
-- GRANT batcher batches xrange
local missing, bytes, looked_up = {}, 0, 0
for at = 2, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[at], ARGV[at])[1]
  looked_up = looked_up + 1
  if entry then
    for _, text in ipairs(entry[2]) do bytes = bytes + #text end
  else
    missing[#missing + 1] = ARGV[at]
  end
  if bytes >= tonumber(ARGV[1]) then break end
end
return { looked_up, unpack(missing) }
