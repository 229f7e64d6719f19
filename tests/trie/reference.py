"""The nodes of a trie, by walking down."""


def node_of(trie, letters):
    node = trie.root
    for letter in letters:
        node = trie.children[node][letter]
    return node


def nodes_by_prefix(trie):
    """Every prefix with its node."""
    found, todo = {}, [((), trie.root)]
    while todo:
        prefix, node = todo.pop()
        found[prefix] = node
        for letter, child in trie.children[node].items():
            if child not in trie.leaf2word:
                todo.append(((*prefix, letter), child))
    return found
