-- Reading ARGV where it holds nested lists. A list is the number of its elements, followed by the elements; each
-- element may be one argument, or several, or contain a list itself. `carpool.store.arguments` writes this format.

-- argument_reader(first): a function that returns ARGV[first] when called, then the argument after it, and so on.
local function argument_reader(first)
  local index = first - 1
  return function()
    index = index + 1
    return ARGV[index]
  end
end

-- take_list(take): read a list whose elements are one argument each. O(elements).
local function take_list(take)
  local list = {}
  for i = 1, tonumber(take()) do list[i] = take() end
  return list
end

