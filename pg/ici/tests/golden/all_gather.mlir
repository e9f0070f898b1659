module @all_gather attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<1x8x128xui32>) -> (tensor<2x8x128xui32>) {
    %0 = "stablehlo.all_gather"(%arg0) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>} : (tensor<1x8x128xui32>) -> tensor<2x8x128xui32>
    return %0 : tensor<2x8x128xui32>
  }
}
