-- put_back(requests, held, payload, arrival_ms, tickets): those who stay of an entry that is gone get a new one.
-- Their tickets, a text with spaces between, go along. Returns the entry's ID. O(tickets), and O(bytes).
local function put_back(requests, held, payload, arrival_ms, tickets)
  if tickets == '' then
    return redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms)
  end
  local id = redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms, 'slots', tickets)
  for ticket in string.gmatch(tickets, '%S+') do move(held, ticket, 'w' .. id) end
  return id
end

