"""The program that the chapters write: their cells tagged "save", collected."""


# ---- 01_one_notebook ----


import math

import torch
from torch import nn
from torch.nn import functional as F

from exlm_mini.config import SPECIAL_TOKENS

PAD, BOS, EOS, MASK = (
    SPECIAL_TOKENS.index(token) for token in ("[PAD]", "[BOS]", "[EOS]", "[MASK]")
)


def every_row(language):
    """All sentences as rows of token ids, from [BOS] to [EOS], (B, N)."""
    word_ids_BN = torch.from_numpy(language.sample(10_000, seed=1)).unique(dim=0)
    row_BN = F.pad(word_ids_BN + len(SPECIAL_TOKENS), (1, 1), value=BOS)
    row_BN[:, -1] = EOS
    return row_BN


def vocabulary(language):
    """The words, indexed by token id."""
    return [*SPECIAL_TOKENS, *language.words]


def hide(row_BN, places):
    """A copy of the rows with [MASK] at these places."""
    masked_BN = row_BN.clone()
    masked_BN[:, places] = MASK
    return masked_BN


def rotate(x_BHTd, position_BT):
    """Turn pairs of features by an angle proportional to a position."""
    half = x_BHTd.shape[-1] // 2
    speed_d = 10_000 ** (-torch.arange(half) / half)
    angle_B1Td = position_BT[:, None, :, None] * speed_d
    x, y = x_BHTd.chunk(2, dim=-1)
    cos, sin = angle_B1Td.cos(), angle_B1Td.sin()
    return torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)


def rope_2d(x_BHTd, i_BT, j_BT):
    """Turn one half of the features by i and the other half by j."""
    by_i, by_j = x_BHTd.chunk(2, dim=-1)
    return torch.cat([rotate(by_i, i_BT), rotate(by_j, j_BT)], dim=-1)


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD, i_BT, j_BT, is_real_B11T):
        q, k, v = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        q, k = rope_2d(q, i_BT, j_BT), rope_2d(k, i_BT, j_BT)
        heads_BHTd = F.scaled_dot_product_attention(q, k, v, is_real_B11T)
        return self.output(heads_BHTd.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, 4 * width)
        self.ffn_out = nn.Linear(4 * width, width)

    def forward(self, x_BTD, *where):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), *where)
        return x_BTD + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(x_BTD))))


class Encoder(nn.Module):
    def __init__(self, vocab_size, width=32, num_heads=2, num_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        layers = [Layer(width, num_heads) for _ in range(num_layers)]
        self.layers = nn.ModuleList(layers)
        self.final_norm = nn.LayerNorm(width)

    def forward(self, ids_BT, i_BT, j_BT, added_BTD=0):
        """Hidden states (B, T, D); `added_BTD` is added to the word vectors."""
        x_BTD = self.embedding(ids_BT) + added_BTD
        is_real_B11T = (ids_BT != PAD)[:, None, None]
        for layer in self.layers:
            x_BTD = layer(x_BTD, i_BT, j_BT, is_real_B11T)
        return self.final_norm(x_BTD)

    def log_words(self, hidden_BTD):
        """log P(word) at every place, (B, T, V)."""
        return (hidden_BTD @ self.embedding.weight.T).log_softmax(dim=-1)


class MLM(nn.Module):
    """Predicts each hidden word from its own [MASK]."""

    def __init__(self, vocab_size):
        super().__init__()
        self.encoder = Encoder(vocab_size)

    def log_words(self, masked_BN):
        """log P(word) at every place, (B, N, V)."""
        i_BN = torch.arange(masked_BN.shape[1]).expand_as(masked_BN)
        return self.encoder.log_words(self.encoder(masked_BN, i_BN, 0 * i_BN))

    def bits(self, masked_BN, sentence_BN):
        """-log2 P(hidden words | visible words), for every row."""
        log_word_BNV = self.log_words(masked_BN)
        log_p_BN = log_word_BNV.gather(2, sentence_BN[:, :, None])[:, :, 0]
        return -(log_p_BN * (masked_BN == MASK)).sum(dim=1) / math.log(2)


def initialise(model, std=0.3):
    """Draw weights from N(0, std²) and set biases to 0."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def train(model, batch, steps=150, peak=3e-3):
    """Minimise model.bits, averaged over batch(); return every tenth loss."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True)
    curve = {}
    for step in range(1, steps + 1):
        # The rate rises for 30 steps and falls over the last 40%.
        rate = peak * min(1, step / 30, 2.5 * (steps - step + 1) / steps)
        optimizer.param_groups[0]["lr"] = rate
        model.progress = step / steps  # used in chapter 7
        loss = model.bits(*batch()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            curve[step] = loss.item()
    return curve


NO_EDGE = -1e9  # as good as log 0, but without nan gradients


class Transition(nn.Module):
    """Log probabilities of the edges, log E, (B, L, L)."""

    def __init__(self, width=32):
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, state_BLD, is_edge_BLL):
        q_BLD, k_BLD = self.query(state_BLD), self.key(state_BLD)
        score_BLL = q_BLD @ k_BLD.transpose(1, 2) / math.sqrt(q_BLD.shape[-1])
        log_BLL = score_BLL.masked_fill(~is_edge_BLL, NO_EDGE).log_softmax(dim=-1)
        # Mask again: [EOS] has no edges, so softmax has made its row uniform.
        return log_BLL.masked_fill(~is_edge_BLL, NO_EDGE)


def log_emissions(log_word_BLV, state_ids_BL, target_BM):
    """log P_u(y_i), (B, M, L); [BOS] and [EOS] say only themselves."""
    index_BML = target_BM[:, :, None].expand(-1, -1, state_ids_BL.shape[1])
    log_P_BML = log_word_BLV.transpose(1, 2).gather(1, index_BML)
    target_BM1, state_B1L = target_BM[:, :, None], state_ids_BL[:, None]
    # The ids up to EOS are those of [PAD], [BOS] and [EOS].
    is_end_BML = (target_BM1 <= EOS) | (state_B1L <= EOS)
    log_end_BML = torch.where(target_BM1 == state_B1L, 0.0, NO_EDGE)
    return torch.where(is_end_BML, log_end_BML, log_P_BML)


def log_forward(log_P_BML, log_E_BLL):
    """log f for every target and state, (B, M, L)."""
    rows = [log_P_BML[:, 0]]
    for i in range(1, log_P_BML.shape[1]):
        arriving_BL = (rows[-1][:, :, None] + log_E_BLL).logsumexp(dim=1)
        rows.append(arriving_BL + log_P_BML[:, i])
    return torch.stack(rows, dim=1)


# ---- 04_states ----


def expand(masked_BN, k):
    """Expand each [MASK] to k clones; ids, i and j of each token, (B, T)."""
    is_mask_BN = masked_BN == MASK
    copies_BN = torch.where(is_mask_BN, k, 1) * (masked_BN != PAD)
    end_BN = copies_BN.cumsum(dim=1)
    place_BT = torch.arange(int(end_BN.max())).repeat(len(masked_BN), 1)
    is_real_BT = place_BT < end_BN[:, -1:]
    # Padding gets the coordinates of token 0.
    i_BT = torch.searchsorted(end_BN, place_BT, right=True) * is_real_BT
    first_BT = (end_BN - copies_BN).gather(1, i_BT)
    j_BT = (place_BT - first_BT + 1) * is_mask_BN.gather(1, i_BT) * is_real_BT
    ids_BT = masked_BN.gather(1, i_BT).masked_fill(~is_real_BT, PAD)
    return ids_BT, i_BT, j_BT


def pack(is_chosen_BX):
    """Indices of the chosen columns of each row, and which of them are real."""
    count_B1 = is_chosen_BX.sum(dim=1, keepdim=True)
    # The chosen columns come first; others follow as padding.
    index_BX = (~is_chosen_BX).int().argsort(dim=1, stable=True)
    column_L = torch.arange(int(count_B1.max()))
    return index_BX[:, : len(column_L)], column_L < count_B1


# ---- 05_sum_over_paths ----


def forward(P_ML, E_LL):
    """f[i, u] of Appendix H, for every target i and state u."""
    M, L = P_ML.shape
    f_ML = P_ML.new_zeros(M, L)
    f_ML[0, 0] = P_ML[0, 0]
    for i in range(1, M):
        for u in range(L):
            for v in range(u):
                f_ML[i, u] += f_ML[i - 1, v] * E_LL[v, u] * P_ML[i, u]
    return f_ML


def backward(P_ML, E_LL):
    """beta[i, u] of Appendix I.1, without the emission of state u itself."""
    M, L = P_ML.shape
    beta_ML = P_ML.new_zeros(M, L)
    beta_ML[-1, -1] = 1.0
    for i in range(M - 2, -1, -1):
        for u in range(L):
            for v in range(u + 1, L):
                beta_ML[i, u] += E_LL[u, v] * P_ML[i + 1, v] * beta_ML[i + 1, v]
    return beta_ML


def gamma_and_xi(P_ML, E_LL):
    """Posteriors of states (M, L) and of edges (L, L)."""
    alpha_ML, beta_ML = forward(P_ML, E_LL), backward(P_ML, E_LL)
    entered_ML = P_ML * beta_ML
    xi_LL = E_LL * (alpha_ML[:-1].T @ entered_ML[1:])
    return alpha_ML * beta_ML / alpha_ML[-1, -1], xi_LL / alpha_ML[-1, -1]


def best_path(P_ML, E_LL):
    """The path with the highest score, and that score."""
    M, L = P_ML.shape
    best_ML = P_ML.new_zeros(M, L)
    best_ML[0, 0] = P_ML[0, 0]
    came_from_ML = torch.zeros(M, L, dtype=torch.int64)
    for i in range(1, M):
        for u in range(1, L):
            arriving_v = best_ML[i - 1, :u] * E_LL[:u, u]
            came_from_ML[i, u] = arriving_v.argmax()
            best_ML[i, u] = arriving_v.max() * P_ML[i, u]
    path = [L - 1]
    for i in range(M - 1, 0, -1):
        path.append(int(came_from_ML[i, path[-1]]))
    return tuple(path[::-1]), best_ML[-1, -1].item()


# ---- 06_own_pieces ----


class Head(nn.Module):
    """log P_u(word) at every state, (B, L, V)."""

    def __init__(self, width, vocab_size):
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, state_BLD, embedding_VD):
        feature_BLD = self.norm(F.gelu(self.dense(state_BLD)))
        return (feature_BLD @ embedding_VD.T + self.bias).log_softmax(dim=-1)


def is_target(ids_BX):
    """Where a path says a token: at [MASK] or a clone of it, [BOS] and [EOS]."""
    return (ids_BX == MASK) | (ids_BX == BOS) | (ids_BX == EOS)


class ExLM(nn.Module):
    """k states for every [MASK], and a learned graph over them."""

    def __init__(self, vocab_size, k=2, width=32):
        super().__init__()
        self.k, self.encoder = k, Encoder(vocab_size, width, num_layers=1)
        self.head, self.transition = Head(width, vocab_size), Transition(width)

    def states(self, masked_BN):
        """Vectors, token ids and j of the states, and which states are real."""
        ids_BT, i_BT, j_BT = expand(masked_BN, self.k)
        hidden_BTD = self.encoder(ids_BT, i_BT, j_BT)
        place_BL, is_real_BL = pack(is_target(ids_BT))
        state_BLD = hidden_BTD[torch.arange(len(ids_BT))[:, None], place_BL]
        return (
            state_BLD,
            ids_BT.gather(1, place_BL),
            j_BT.gather(1, place_BL),
            is_real_BL,
        )

    def log_E(self, state_BLD, j_BL, is_real_BL):
        """log E, (B, L, L); only subclasses use j_BL."""
        L = state_BLD.shape[1]
        is_edge_BLL = torch.ones(L, L).triu(1).bool() & is_real_BL[:, None]
        return self.transition(state_BLD, is_edge_BLL)

    def bits(self, masked_BN, sentence_BN):
        """-log2 P(hidden words | visible words), for every row."""
        state_BLD, ids_BL, j_BL, is_real_BL = self.states(masked_BN)
        log_word_BLV = self.head(state_BLD, self.encoder.embedding.weight)
        place_BM, is_target_BM = pack(is_target(masked_BN))
        target_BM = sentence_BN.gather(1, place_BM)
        log_P_BML = log_emissions(log_word_BLV, ids_BL, target_BM)
        log_f_BML = log_forward(log_P_BML, self.log_E(state_BLD, j_BL, is_real_BL))
        row_B = torch.arange(len(masked_BN))
        last_target_B = is_target_BM.sum(dim=1) - 1
        last_state_B = is_real_BL.sum(dim=1) - 1
        return -log_f_BML[row_B, last_target_B, last_state_B] / math.log(2)


def rows_of(masked_BN, sentence_BN, seed):
    """A function that draws 64 masked rows and their originals at every call."""
    draw = torch.Generator().manual_seed(seed)

    def batch():
        rows = torch.randint(len(sentence_BN), (64,), generator=draw)
        return masked_BN[rows], sentence_BN[rows]

    return batch


class SparseExLM(ExLM):
    """ExLM without edges between two states of one mask (Appendix Q.3)."""

    def log_E(self, state_BLD, j_BL, is_real_BL):
        owner_BL = (j_BL <= 1).cumsum(dim=1)
        is_edge_BLL = owner_BL[:, :, None] < owner_BL[:, None]
        return self.transition(state_BLD, is_edge_BLL & is_real_BL[:, None])


# ---- 07_symmetric_start ----


class AidedExLM(ExLM):
    """ExLM with a learned vector for each clone, and chains that fade out."""

    def __init__(
        self, vocab_size, k=2, width=32, has_vectors=True, has_chains=True
    ):
        super().__init__(vocab_size, k, width)
        self.clone = nn.Embedding(k + 1, width)  # row 0 is for [BOS] and [EOS]
        self.progress = 1.0
        self.has_chains = has_chains
        initialise(self, std=0.125)  # done here: later it would shrink the vectors
        nn.init.normal_(self.clone.weight, std=1.0 if has_vectors else 0.0)
        self.clone.requires_grad_(has_vectors)

    def states(self, masked_BN):
        state_BLD, ids_BL, j_BL, is_real_BL = super().states(masked_BN)
        return state_BLD + self.clone(j_BL), ids_BL, j_BL, is_real_BL

    def log_E(self, state_BLD, j_BL, is_real_BL):
        log_E_BLL = super().log_E(state_BLD, j_BL, is_real_BL)
        share = max(0.0, min(0.95, 2 - 4 * self.progress)) * self.has_chains
        if share == 0:
            return log_E_BLL
        log_chain_BLL = log_chains(j_BL, is_real_BL)
        return torch.logaddexp(
            log_E_BLL + math.log(1 - share), log_chain_BLL + math.log(share)
        )


def log_chains(j_BL, is_real_BL):
    """Log of the chains: clone j leads to the next clone j, [BOS] to all alike."""
    owner_BL = (j_BL <= 1).cumsum(dim=1)
    from_BL1, to_B1L = j_BL[:, :, None], j_BL[:, None]
    is_same_BLL = (from_BL1 == to_B1L) | (from_BL1 == 0) | (to_B1L == 0)
    is_next_BLL = owner_BL[:, :, None] + 1 == owner_BL[:, None]
    chain_BLL = (is_next_BLL & is_same_BLL & is_real_BL[:, None]).float()
    chain_BLL = chain_BLL / chain_BLL.sum(dim=2, keepdim=True).clamp(min=1)
    return chain_BLL.log().clamp(min=NO_EDGE)
