-- put_back(requests, held, payload, arrival_ms, slots): those who stay of an entry that is gone get a new one.
-- Their slots, a text with spaces between, go along. Returns the entry's ID. O(slots), and O(bytes).
local function put_back(requests, held, payload, arrival_ms, slots)
  if slots == '' then
    return redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms)
  end
  local id = redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms, 'slots', slots)
  for slot in string.gmatch(slots, '%S+') do move(held, slot, 'w' .. id) end
  return id
end

